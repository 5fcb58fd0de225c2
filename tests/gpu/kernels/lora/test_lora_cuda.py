"""Products with adapters on a real GPU: against float64, each row by itself bit for bit, and captured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from lora_case import ACTIVATED, CASES, Case, Made

from quire.kernels import act, catalog, lora
from quire.kernels.invariance import rows_alone
from quire.kernels.lora import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(catalog.triton_obstacle() is not None, reason=str(catalog.triton_obstacle())),
]
LARGE = Case(
    k=4096, sizes=(4096, 1024, 1024), ranks=((16,) * 3, (256, 0, 64), (8,) * 3), places=(0, 1, 2, -1) * 40, norm=True
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_gpu(made: Made) -> tuple[torch.Tensor, lora.Stack, tuple[torch.Tensor, float] | None]:
    stack = made.stack
    moved = lora.Stack(stack.a.cuda(), stack.b.cuda(), stack.ranks.cuda(), stack.blocks.cuda(), stack.sizes)
    return made.x.cuda(), moved, None if made.norm is None else (made.norm[0].cuda(), made.norm[1])


def tiles(made: Made, places: np.ndarray) -> lora.Tiles:
    found = made.tiles(places)
    return lora.Tiles(found.order.cuda(), found.tiles.cuda())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, LARGE])
def test_equals_float64_and_itself_alone(case: Case, dtype: torch.dtype) -> None:
    case = dataclasses.replace(case, dtype=dtype)
    made = Made(case)
    x, stack, norm = on_gpu(made)
    y = made.y.cuda()
    lora.add(x, stack, tiles(made, made.places), y, norm)
    expected, got = made.expected(), y.cpu()
    assert ((got.double() - expected.double()).abs() / (1 + expected.abs())).max() <= reference.TOLERANCE[dtype]
    without = torch.from_numpy(made.places < 0)
    assert torch.equal(got[without], made.y[without])
    for row in range(0, len(y), 7):
        places = np.full(len(y), -1, np.int32)
        places[row] = made.places[row]
        alone = made.y.cuda()
        lora.add(x, stack, tiles(made, places), alone, norm)
        assert torch.equal(alone[row], y[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [*ACTIVATED, dataclasses.replace(LARGE, sizes=(6144, 6144), ranks=((16, 16), (0, 16)), places=(0, 1, -1) * 50)],
)
def test_activated_is_added_then_activated(case: Case, dtype: torch.dtype) -> None:
    made = Made(dataclasses.replace(case, dtype=dtype))
    x, stack, norm = on_gpu(made)
    y, added, sent = made.y.cuda(), made.y.cuda(), tiles(made, made.places)
    activated = torch.full((len(y), case.sizes[0]), float("nan"), dtype=dtype, device="cuda")
    lora.add(x, stack, sent, y, norm, activated)
    lora.add(x, stack, sent, added, norm)
    assert torch.equal(activated, act.silu_mul(added)), "rows without an adapter too"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_prompt_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    made = Made(dataclasses.replace(LARGE, places=(0, 1, 2, -1, 0) * 200, dtype=dtype))
    x, stack, norm = on_gpu(made)
    y = made.y.cuda()
    with rows_alone():  # float16 is normed before, by an op that sums few rows otherwise
        lora.add(x, stack, tiles(made, made.places), y, norm)
        for row in (0, 1, 502, 999):
            alone = made.y.cuda()[row : row + 1]
            lora.add(x[row : row + 1], stack, tiles(made, made.places[row : row + 1]), alone, norm)
            assert torch.equal(alone[0], y[row])


def test_a_captured_call_reads_what_was_sent() -> None:
    made = Made(dataclasses.replace(LARGE, dtype=torch.bfloat16))
    x, stack, norm = on_gpu(made)
    y, own = made.y.cuda(), tiles(made, np.full(len(made.y), -1, np.int32))
    lora.add(x, stack, own, y, norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora.add(x, stack, own, y, norm)
    graph.replay()
    assert torch.equal(y.cpu(), made.y), "rows without adapters"
    sent = tiles(made, made.places)
    own.order.copy_(sent.order)
    own.tiles.copy_(sent.tiles)
    graph.replay()
    expected = made.y.cuda()
    lora.add(x, stack, sent, expected, norm)
    assert torch.equal(y, expected)
