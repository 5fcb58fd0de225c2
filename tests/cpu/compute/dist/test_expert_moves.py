"""Experts on their way between ranks: each slot ends with its expert, bit for bit, whoever changes places with whom.

Ranks are threads of this process, over gloo."""

from __future__ import annotations

import pathlib
import random

import pytest
import torch
from gloo_ranks import on_ranks

from quire.compute.dist.expert_moves import move
from quire.compute.dist.gloo import GlooComm

SHAPES = (((3, 5), torch.float32), ((7,), torch.bfloat16), ((2, 3), torch.uint8), ((4,), torch.float8_e4m3fn))


def stored(expert: int) -> list[torch.Tensor]:
    """A tensor of each kind, whose bytes are this expert's own."""
    generator = torch.Generator().manual_seed(expert)
    found = []
    for shape, dtype in SHAPES:
        n_bytes = dtype.itemsize * torch.Size(shape).numel()
        data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator)
        found.append(data.view(dtype).view(shape))
    return found


def moved(old: list[int], new: list[int], n_ranks: int, limit_bytes: int, folder: pathlib.Path) -> list[int]:
    """Bytes that each rank took; every slot is looked at."""
    own = len(old) // n_ranks

    def work(comm: GlooComm) -> int:
        mine = slice(comm.rank * own, (comm.rank + 1) * own)
        held = [stored(expert) for expert in old[mine]]
        addresses = [one.data_ptr() for slot in held for one in slot]
        n_bytes = move(comm, old, new, held, limit_bytes)
        assert addresses == [one.data_ptr() for slot in held for one in slot]
        for slot, expert in zip(held, new[mine], strict=True):
            for one, expected in zip(slot, stored(expert), strict=True):
                assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))
        return n_bytes

    return on_ranks(n_ranks, folder, work)


EACH = sum(one.nbytes for one in stored(0))


@pytest.mark.parametrize("limit_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("old, new, n_ranks, taken", [
    ([0, 1, 2, 3], [2, 1, 0, 3], 2, [1, 1]),  # two change places
    ([0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3], 3, [2, 2, 2]),  # all go round
    ([0, 1, 2, 0, 1, 3], [0, 2, 1, 3, 0, 3], 2, [2, 2]),  # within a rank, and a copy of one that goes
    ([0, 1, 0, 1], [0, 1, 0, 1], 2, [0, 0]),
])  # fmt: skip
def test_every_slot_gets_its_expert(
    old: list[int], new: list[int], n_ranks: int, taken: list[int], limit_bytes: int, tmp_path: pathlib.Path
) -> None:
    assert moved(old, new, n_ranks, limit_bytes, tmp_path) == [n * EACH for n in taken]


@pytest.mark.parametrize("seed", range(4))
def test_any_placement_can_follow_any_other(seed: int, tmp_path: pathlib.Path) -> None:
    source = random.Random(seed)
    slots = [*range(7), *source.choices(range(7), k=5)]
    old, new = (source.sample(slots, 12) for _ in range(2))
    moved(old, new, 4 if seed % 2 else 3, 30, tmp_path)
