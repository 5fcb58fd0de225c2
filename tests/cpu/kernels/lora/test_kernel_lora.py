"""Products with adapters: both layouts against plain formulas, rows by themselves, and the Triton kernels."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from lora_case import CASES, MIXED, Case, Made

from quire.kernels import lora
from quire.kernels.lora import places, reference
from quire.kernels.lora.weight import most_tiles, tile_of, tiles_room
from quire.planner import adapters

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]


def script(name: str, **variables: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, HERE.parent)))
    command = [sys.executable, str(HERE / name)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | variables | {"PYTHONPATH": paths}, check=False
    )
    return done.stdout.strip() or done.stderr[-3000:]


def test_reference_is_the_formula() -> None:
    made = Made(MIXED)
    got = made.expected()
    for row, place in enumerate(MIXED.places):
        expected, start = made.y[row].double(), 0
        for part, size in enumerate(MIXED.sizes if place >= 0 else ()):
            rank, first = MIXED.ranks[place][part], part * made.stack.most
            a, b = made.stack.a[place, first : first + rank], made.stack.b[place, start : start + size, :rank]
            expected[start : start + size] += b.double() @ (a.double() @ made.x[row].double())
            start += size
        assert (got[row] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("case", [*CASES, dataclasses.replace(MIXED, dtype=torch.bfloat16, norm=True, seed=5)])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_lines_equal_stacked(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "reference":
        monkeypatch.setattr("quire.kernels.lora.op.select", lambda *_: reference.add_lines)
    made = Made(case)
    y, expected = made.y.clone(), made.expected()
    lora.add_lines(made.x, made.lines, made.places, y, made.norm)
    assert ((y - expected).abs() / (1 + expected.abs())).max() <= reference.TOLERANCE[case.dtype]
    without = torch.from_numpy(made.places < 0)
    assert torch.equal(y[without], made.y[without])
    for row in range(len(case.places) if name == "cpu" else 0):
        alone = made.y[row : row + 1].clone()
        lora.add_lines(made.x[row : row + 1], made.lines, made.places[row : row + 1], alone, made.norm)
        assert torch.equal(alone[0], y[row]), "its bits depend on other rows"


def test_tiles_have_every_row_once() -> None:
    generator = np.random.default_rng(0)
    for n in (1, 2, 15, 16, 17, 64, 300, 512, 513, 1000):
        places = generator.integers(-1, 5, n).astype(np.int32)
        order, tiles = lora.tiles_of(places, most_tiles(n, 5))
        found = [(int(row), place) for place, first, count in tiles.tolist() for row in order[first : first + count]]
        assert sorted(found) == [(row, int(place)) for row, place in enumerate(places)]
        assert int(tiles[:, 2].max()) <= tile_of(n)
        assert all(most_tiles(fewer, 5) <= tiles_room(n, 5) for fewer in range(1, n + 1)), "memory of captured steps"


def test_mismatches_are_refused() -> None:
    made = Made(MIXED)
    tiles = made.tiles(made.places)
    with pytest.raises(ValueError, match="does not fit k = 96"):
        lora.add(made.x[:, :95], made.stack, tiles, made.y)
    with pytest.raises(ValueError, match="must be"):
        lora.add(made.x, made.stack, tiles, made.y[:, :100])
    with pytest.raises(ValueError, match="are no gates"):
        lora.add(made.x, made.stack, tiles, made.y, None, made.y)
    with pytest.raises(ValueError, match="do not fit parts"):
        lora.add(made.x, dataclasses.replace(made.stack, sizes=(64, 64)), tiles, made.y)
    with pytest.raises(ValueError, match="does not fit k"):
        lora.add_lines(made.x[:, :95], made.lines, made.places, made.y)
    with pytest.raises(ValueError, match="place 4 is not one of 4"):
        lora.add_lines(made.x, made.lines, made.places + 1, made.y)
    with pytest.raises(ValueError, match="do not fit 127 outputs"):
        lora.Places(1, 127, 96).put(0, made.lines[1])


def test_the_planner_counts_with_the_same_sums() -> None:
    pytest.importorskip("triton")
    from quire.kernels.lora import triton

    assert (adapters.MOST_SUMS, adapters.SUM_INPUTS) == (triton.MOST_PARTS, triton.PART_IN)
    assert (adapters.LINES, adapters.OUTPUTS) == (places.LINES, places.OUTPUTS)


def test_triton(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton")
    assert script("interpreted_lora.py", TRITON_INTERPRET="1") == "fine"
    assert (
        script("compiled_lora.py", TRITON_INTERPRET="0", TRITON_DISABLE_LINE_INFO="1", TRITON_CACHE_DIR=str(tmp_path))
        == "fine"
    )
