"""How many sequences have states beside keys and values, where nobody says: the rule by itself."""

from __future__ import annotations

import pytest

from quire.planner.states import SNAPSHOTS_EACH, fitting_seqs, n_kept_states


@pytest.mark.parametrize("most", [1, 2, 37, 1024])
@pytest.mark.parametrize("max_model_len", [1, 500, 4000, 9000])
@pytest.mark.parametrize("each", [0, 3, 70, 5000])
def test_the_most_that_leave_the_length_or_half_of_what_one_has(most: int, max_model_len: int, each: int) -> None:
    def n_tokens(n_seqs: int) -> int:
        return max(0, 8000 - each * n_seqs)

    found, alone = fitting_seqs(most, max_model_len, n_tokens), n_tokens(1)
    wanted = max_model_len if alone >= max_model_len else alone // 2
    assert 1 <= found <= most
    assert found == 1 or n_tokens(found) >= wanted
    assert found == most or n_tokens(found + 1) < wanted


def test_none_fits() -> None:
    assert fitting_seqs(1024, 100, lambda n: 0) == 1


def test_kept_states_are_a_tenth_of_what_is_free_or_a_few_a_slot() -> None:
    assert n_kept_states(1000, 7, 64) == 14
    assert n_kept_states(1000, 7, 2) == 2 * SNAPSHOTS_EACH
    assert n_kept_states(-5, 7, 64) == 0, "weights that do not fit"
    assert n_kept_states(1000, 0, 64) == 0, "a model without states"
