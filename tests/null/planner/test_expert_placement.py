"""Where experts go: every expert somewhere, ranks more even than before, and nothing moves for nothing."""

from __future__ import annotations

import collections
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.planner.expert_placement import LEAST_GAIN, imbalance, rearranged, sources

PUBLISHED = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
"""Loads of the first layer in the README of DeepSeek's EPLB; with 16 slots it copies experts 1, 4, 5 and 10."""


def in_turn(n_experts: int, n_slots: int) -> list[int]:
    return [slot % n_experts for slot in range(n_slots)]


def test_the_experts_of_the_published_example_are_copied() -> None:
    found = collections.Counter(rearranged(PUBLISHED, in_turn(12, 16), 8))
    assert {expert for expert, n in found.items() if n == 2} == {1, 4, 5, 10} and max(found.values()) == 2


def test_load_of_a_rank_counts_a_part_of_a_copied_expert() -> None:
    assert imbalance([6, 2], [0, 1, 0, 1], 2) == 1.0
    assert imbalance([6, 2, 0, 0], [0, 1, 2, 3], 2) == 2.0
    assert imbalance([6, 3, 3, 0], [0, 1, 3, 0, 2, 3], 2) == 1.0
    assert imbalance([0, 0], [0, 1], 2) == 0.0


def test_a_hot_expert_gets_a_copy_on_each_rank() -> None:
    found = rearranged([90, 1, 1, 1, 1, 1, 1, 1], in_turn(8, 12), 4)
    assert all(0 in found[first : first + 3] for first in range(0, 12, 3))


def test_the_heaviest_go_first() -> None:
    assert imbalance([10, 9, 8, 2, 1, 0], rearranged([10, 9, 8, 2, 1, 0], in_turn(6, 6), 3), 3) == 1.0


def test_no_expert_has_more_copies_than_there_are_ranks() -> None:
    assert collections.Counter(rearranged([1000, 9, 8, 1], [0, 1, 2, 3, 3, 2], 2)) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_copies_of_an_expert_are_on_several_ranks() -> None:
    assert rearranged([22, 28, 10, 9, 20], in_turn(5, 6), 3) == [0, 3, 2, 1, 4, 1]
    for draw in range(20):
        loads = [random.Random(f"{draw} {expert}").paretovariate(1.2) for expert in range(32)]
        found = rearranged(loads, in_turn(32, 40), 4)
        assert all(len(set(found[first : first + 10])) == 10 for first in range(0, 40, 10))
        assert imbalance(loads, found, 4) < 1.1


def test_packs_go_to_ranks_that_have_most_of_them() -> None:
    old = [2, 4, 0, 5, 1, 3]
    found = rearranged([10, 9, 8, 2, 1, 0], old, 3)
    assert found == [1, 4, 0, 5, 2, 3] and sources(old, found, 3) == [(4, 0), (0, 4)]


def test_without_copies_greedy_packing_is_near_the_best() -> None:
    """All ways to divide eight experts between two ranks; the bound of Graham's longest-first rule for two is 7/6."""
    loads = [70, 50, 40, 30, 20, 20, 10, 5]
    halves = [sum(loads[one] for one in half) for half in itertools.combinations(range(8), 4)]
    best = min(max(half, sum(loads) - half) for half in halves)
    found = rearranged(loads, in_turn(8, 8), 2)
    assert imbalance(loads, found, 2) <= 7 / 6 * best * 2 / sum(loads) < imbalance(loads, in_turn(8, 8), 2)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    n_ranks, own = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    n_slots = n_ranks * own
    n_experts = draw(st.integers(max(1, own), n_slots))
    loads = draw(st.lists(st.integers(0, 1000), min_size=n_experts, max_size=n_experts))
    more = draw(st.lists(st.integers(0, n_experts - 1), min_size=n_slots - n_experts, max_size=n_slots - n_experts))
    return loads, draw(st.permutations([*range(n_experts), *more])), n_ranks


@given(cases())
def test_every_expert_has_a_slot_and_no_rank_gets_more_than_before(case: tuple[list[int], list[int], int]) -> None:
    loads, slots, n_ranks = case
    found = rearranged(loads, slots, n_ranks)
    assert len(found) == len(slots) and set(found) == set(slots) and found == rearranged(loads, slots, n_ranks)
    before, after = imbalance(loads, slots, n_ranks), imbalance(loads, found, n_ranks)
    assert found == slots or before - after >= LEAST_GAIN * before
    assert rearranged(loads, found, n_ranks) == found, "the same loads move nothing again"


@given(cases())
def test_what_stays_on_a_rank_stays_in_its_slot_and_the_rest_comes_from_who_has_it(
    case: tuple[list[int], list[int], int],
) -> None:
    loads, slots, n_ranks = case
    found, own = rearranged(loads, slots, n_ranks), len(slots) // n_ranks
    moves = sources(slots, found, n_ranks)
    assert [target for _, target in moves] == [one for one in range(len(slots)) if slots[one] != found[one]]
    assert all(slots[source] == found[target] for source, target in moves)
    for first in range(0, len(slots), own):
        old, new = (collections.Counter(one[first : first + own]) for one in (slots, found))
        n_moved = sum(first <= target < first + own for _, target in moves)
        assert n_moved == own - (old & new).total()


@pytest.mark.parametrize("loads", [[0, 0, 0, 0], [5, 5, 5, 5]])
def test_even_loads_move_nothing(loads: list[int]) -> None:
    assert rearranged(loads, [3, 1, 2, 0], 2) == [3, 1, 2, 0]
