"""The trade between the chance of a draft and the time of its row."""

from __future__ import annotations

import itertools

import pytest

from quire.planner.drafts import DraftCosts, expected_tokens, least_gain

COSTS = DraftCosts((1, 2, 4, 8), (1.0, 1.1, 1.3, 2.5), guess_s=0.05)
BATCHED = DraftCosts((1, 2, 4, 8), (1.0, 1.1, 1.3, 2.5), guess_s=0.01, place_s=0.2)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_expected_tokens_is_the_sum_over_places(rate: float, n: int) -> None:
    """One token always, and each draft if it and all before it are right."""
    assert expected_tokens(rate, n) == pytest.approx(sum(rate**place for place in range(n + 1)))


def test_seconds_lie_on_lines_between_what_was_measured() -> None:
    assert [COSTS.seconds(n) for n in (1, 2, 4, 8)] == [1.0, 1.1, 1.3, 2.5]
    assert COSTS.seconds(3) == pytest.approx(1.2)
    assert COSTS.seconds(6) == pytest.approx(1.9)
    assert COSTS.seconds(12) == pytest.approx(3.7)
    assert DraftCosts((1,), (2.0,), 0.0).seconds(9) == 2.0


def speed(costs: DraftCosts, rates: list[float], lengths: list[int], n_rows: int, exposed_s: float) -> float:
    n_drafts = sum(lengths)
    tokens = n_rows - len(rates) + sum(expected_tokens(*one) for one in zip(rates, lengths, strict=True))
    extra_s = exposed_s + costs.guesses_s(lengths) if n_drafts else 0.0
    return tokens / (costs.seconds(n_rows + n_drafts) + extra_s)


@pytest.mark.parametrize("costs", [COSTS, BATCHED])
@pytest.mark.parametrize("exposed_s", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("rates", [[0.9], [0.2], [0.8, 0.3], [0.95, 0.9, 0.05], [0.0, 0.7]])
def test_no_other_lengths_are_faster(costs: DraftCosts, rates: list[float], exposed_s: float) -> None:
    """Against all of them: giving rows one by one by the best chance misses nothing."""
    most, n_rows = 3, len(rates) + 1
    found = costs.choose(rates, most, n_rows, 99, exposed_s, 0.0)
    every = itertools.product(range(most + 1), repeat=len(rates))
    best = max(speed(costs, rates, list(lengths), n_rows, exposed_s) for lengths in every)
    plain = speed(costs, rates, [0] * len(rates), n_rows, exposed_s)
    chosen = speed(costs, rates, found, n_rows, exposed_s)
    assert chosen == pytest.approx(best if best > least_gain(n_rows) * plain else plain)


def test_rows_are_bounded() -> None:
    flat = DraftCosts((1, 16), (1.0, 1.2), 0.0)
    assert sum(flat.choose([0.99] * 4, 8, 4, 5, 0.0, 0.0)) == 5
    assert COSTS.choose([1.0], 2, 1, 9, 0.0, 0.0) == [2]


def test_nothing_is_drafted_where_plain_steps_are_faster() -> None:
    assert COSTS.choose([0.9, 0.9], 4, 2, 9, 50.0, 0.0) == [0, 0]
    assert COSTS.choose([0.9], 4, 1, 9, 50.0, 50.0) != [0], "where plain steps cost as much beside their rows"
    assert COSTS.choose([0.0], 4, 1, 9, 0.0, 0.0) == [0]


def test_a_place_is_paid_once_for_all() -> None:
    assert BATCHED.guesses_s([3, 1, 2]) == pytest.approx(3 * 0.2 + 6 * 0.01)
    assert BATCHED.guesses_s([]) == 0.0
    each, together = (DraftCosts((1, 64), (1.0, 1.1), guess_s, place_s=0.2 - guess_s) for guess_s in (0.2, 0.0))
    assert each.choose([0.9], 2, 1, 99, 0.0, 0.0) == together.choose([0.9], 2, 1, 99, 0.0, 0.0) != [0]
    assert each.choose([0.9] * 8, 2, 8, 99, 0.0, 0.0) == [0] * 8
    assert together.choose([0.9] * 8, 2, 8, 99, 0.0, 0.0) == [2] * 8


def test_places_have_chances_of_their_own() -> None:
    """A head whose first guess is right half the time, and those behind a right one always: one draft does not pay,
    four do; and the other way round one does."""
    costs = DraftCosts((1, 8), (1.0, 1.35), guess_s=0.05)
    assert costs.choose([0.6], 4, 1, 8, 0.7, 0.0) == [0]
    assert costs.choose([0.6], 4, 1, 8, 0.7, 0.0, [0.5 / 0.6] + [1 / 0.6] * 3) == [4]
    assert costs.choose([0.6], 4, 1, 8, 0.1, 0.0, [1.5, 0.1, 0.1, 0.1]) == [1]
