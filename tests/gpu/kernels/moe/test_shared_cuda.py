"""Experts and what all tokens share in one call on a real GPU: against float64, poisoned memory, graphs, equal bits."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch
from coded_experts import error

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "cpu" / "kernels" / "moe"))
import shared_cases

from quire.config.experts import RoutingSpec
from quire.kernels import catalog, moe
from quire.kernels.invariance import rows_alone
from quire.kernels.moe import composed, hopper_shared, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle())),
]


def poison() -> None:
    """What torch hands out next is NaN."""
    blocks = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(12, 24)]
    blocks.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", shared_cases.SHAPES + shared_cases.MANY, ids=str)
def test_one_call_matches_float64_with_the_same_bits_every_time(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = shared_cases.arguments(shape, dtype, "cuda")
    *arguments, residual = given
    sums = shared_cases.expected(*given[:-1])
    assert isinstance(hopper_shared.prepare(*given), hopper_shared.SharedLaunch)
    torch.cuda.synchronize()
    found = []
    for _ in range(3):
        poison()
        into = residual.clone()
        assert moe.experts_with_shared(*arguments, residual=into) is into
        found.append(into)
    assert error(found[0], sums, residual) <= reference.TOLERANCE[dtype]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    new = moe.experts_with_shared(*arguments)
    assert error(new, sums) <= reference.TOLERANCE[dtype]


@pytest.mark.parametrize("n", [9, 200])
def test_more_rows_are_multiplied_apart(n: int) -> None:
    torch.manual_seed(1)
    given = shared_cases.arguments((n, 6, 64, 512, 256, 2), torch.bfloat16, "cuda")
    assert isinstance(hopper_shared.prepare(*given), str)
    sums = shared_cases.expected(*given[:-1])
    *arguments, residual = given
    got = moe.experts_with_shared(*arguments, residual=residual.clone())
    assert torch.equal(got, composed.experts_with_shared(*arguments, residual.clone()))
    assert error(got, sums, residual) <= reference.TOLERANCE[torch.bfloat16]


def test_rows_alone_have_the_same_bits_however_many_they_are() -> None:
    torch.manual_seed(3)
    x, ids, weights, *matrices, residual = shared_cases.arguments((400, 6, 64, 512, 256, 2), torch.bfloat16, "cuda")

    def run(rows: slice) -> torch.Tensor:
        return moe.experts_with_shared(x[rows], ids[rows], weights[rows], *matrices, residual=residual[rows].clone())

    with rows_alone():
        whole = run(slice(0, 400))
        for rows in (slice(0, 1), slice(5, 13), slice(100, 148), slice(0, 64), slice(1, 66), slice(200, 400)):
            assert torch.equal(run(rows), whole[rows]), rows


@pytest.mark.parametrize("n", [1, 4, 8])
def test_a_graph_follows_the_routing(n: int) -> None:
    torch.manual_seed(2)
    x, _, _, *matrices, residual = shared_cases.arguments((n, 6, 64, 512, 256, 2), torch.bfloat16, "cuda")
    router, routing = torch.randn(64, 512, device="cuda") * 512**-0.5, RoutingSpec(n_chosen=6)

    def run() -> torch.Tensor:
        y = x
        for _ in range(3):
            ids, weights = moe.choose(y, router, routing)
            y = moe.experts_with_shared(y, ids, weights, *matrices, residual=residual.clone())
        return y

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(10):
        x.copy_(torch.randn_like(x))
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(y, run())
