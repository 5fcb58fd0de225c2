"""Run by `test_kernel_lora.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import numpy as np
import quick_interpreter  # noqa: F401
import torch
from lora_case import ACTIVATED, CASES, Made

from quire.kernels.act import triton as act
from quire.kernels.lora import reference, triton, weight


def check_activated() -> None:
    """The same as added, then activated, bit for bit, of rows without an adapter too; in parts of any evenness."""
    for case in ACTIVATED:
        made = Made(case)
        tiles, y, added = made.tiles(made.places), made.y.clone(), made.y.clone()
        activated = torch.full((len(y), case.sizes[0]), float("nan"), dtype=case.dtype)
        triton.add(made.x, made.stack, tiles, y, made.norm, activated)
        triton.add(made.x, made.stack, tiles, added, made.norm)
        assert torch.equal(activated, act.silu_mul(added)), case
        assert torch.equal(activated[made.places < 0], act.silu_mul(made.y)[made.places < 0])


def check_large_tiles() -> None:
    """In a step of many rows a row has the bits that it has in one of few."""
    for case in (CASES[1], CASES[3], *ACTIVATED):
        made = Made(case)
        found = []
        for many_rows in (weight.MANY_ROWS, 8):
            weight.MANY_ROWS = many_rows
            tiles, y, added = made.tiles(made.places), made.y.clone(), made.y.clone()
            triton.add(made.x, made.stack, tiles, added, made.norm)
            found.append(added)
            if case in ACTIVATED:
                found[-1] = torch.zeros(len(y), case.sizes[0], dtype=case.dtype)
                triton.add(made.x, made.stack, tiles, y, made.norm, found[-1])
        weight.MANY_ROWS = 512
        assert (tiles.tiles[:, 2] > weight.TILE).any() and torch.equal(*found), case


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_activated()
    check_large_tiles()
    for case in CASES:
        made = Made(case)
        y, expected = made.y.clone(), made.expected()
        triton.add(made.x, made.stack, made.tiles(made.places), y, made.norm)
        error = ((y - expected).abs() / (1 + expected.abs())).max()
        assert error <= reference.TOLERANCE[case.dtype], (case, error)
        without = torch.from_numpy(made.places < 0)
        assert torch.equal(y[without], made.y[without])
        assert not torch.equal(y, made.y)
        for row in (0, len(y) - 1):  # by itself it has the same bits
            if case.places[row] >= 0:
                alone, places = made.y.clone(), np.full(len(y), -1, np.int32)
                places[row] = case.places[row]
                triton.add(made.x, made.stack, made.tiles(places), alone, made.norm)
                assert torch.equal(alone[row], y[row]), (case, row)
    print("fine")
