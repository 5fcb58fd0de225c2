"""Tokens that are written late are those that would have been written at once."""

from __future__ import annotations

import random
import types
from typing import Any

import numpy as np
import pytest
import torch

from quire.compute.runner.host_tokens import MOST_LATE, STEP_ROWS, HostTokens

N_SLOTS, LENGTH = 6, 40


def tables(*, is_shared: bool = False) -> Any:
    return types.SimpleNamespace(is_shared=is_shared, tokens=torch.zeros(N_SLOTS, LENGTH, dtype=torch.int32))


@pytest.mark.parametrize("read_every", [1, 7, 1000])
def test_whoever_reads_sees_all_steps_in_their_order(read_every: int) -> None:
    """Steps of sequences that leave meanwhile are passed over; a place that comes again has what came last."""
    rng, found, truth = random.Random(read_every), HostTokens(tables()), np.zeros((N_SLOTS, LENGTH), np.int32)
    for step in range(5 * MOST_LATE // STEP_ROWS):
        n_opened = found.n_opened
        slots = rng.sample(range(N_SLOTS), 3)
        if step % 3 == 0:  # while the step computes
            slot, prompt = rng.randrange(N_SLOTS), [rng.randrange(1, 99) for _ in range(4)]
            found.open(slot, prompt)
            truth[slot] = 0  # whatever else is there
            truth[slot, :4] = prompt
            slots_there = [one for one in slots if one != slot]
        else:
            slots_there = slots
        places, ids = [rng.randrange(LENGTH) for _ in slots], [rng.randrange(1, 99) for _ in slots]
        found.add(np.array(slots), np.array(places), torch.tensor(ids, dtype=torch.int32), n_opened)
        for slot, place, token in zip(slots, places, ids, strict=True):
            if slot in slots_there:
                truth[slot, place] = token
        if step % read_every == 0:
            np.testing.assert_array_equal(np.where(truth > 0, found.newest, 0), truth)
    np.testing.assert_array_equal(np.where(truth > 0, found.newest, 0), truth)
    assert truth.any(1).all()


@pytest.mark.parametrize("n_rows", [1, 128])
def test_what_is_not_written_yet_is_bounded(n_rows: int) -> None:
    found, places = HostTokens(tables()), np.arange(n_rows)
    for _ in range(MOST_LATE // (STEP_ROWS + n_rows)):
        found.add(places % N_SLOTS, places % LENGTH, torch.ones(n_rows, dtype=torch.int32), 0)
        assert not found._tokens.any()
    found.add(places % N_SLOTS, places % LENGTH, torch.ones(n_rows, dtype=torch.int32), 0)
    assert found._tokens.any() and not found._late


def test_a_table_that_the_host_sees_is_read_in_its_place() -> None:
    shared = tables(is_shared=True)
    found = HostTokens(shared)
    found.open(2, [5, 6])
    shared.tokens[2, :2] = torch.tensor([5, 6])
    assert found.newest[2, :2].tolist() == [5, 6] and found.is_there(2, 1) and not found.is_there(2, 0)
