"""The choice of experts in one launch on a real GPU: against float64, behind kernels that end late, in a graph."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "cpu" / "kernels" / "moe"))
import route_cases

from quire.config.experts import RoutingSpec
from quire.kernels import catalog, moe
from quire.kernels.invariance import rows_alone
from quire.kernels.moe import hopper_router, reference
from quire.kernels.norm import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle())),
]
LITE = RoutingSpec(n_chosen=6)


@pytest.mark.parametrize("dtype", hopper_router.DTYPES, ids=str)
def test_the_kernel_chooses_as_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cases = route_cases.ROUTERS + route_cases.MANY
    route_cases.check_choose(hopper_router.choose, reference.choose, cases, dtype, "cuda", 2e-6)


@pytest.mark.parametrize("n", [1, 32, 64, 65, 300, 600])
def test_the_op_takes_it_and_rows_do_not_depend_on_the_batch(n: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, 2048, device="cuda") * 2048**-0.5
    is_few = n <= hopper_router.MAX_ROWS
    assert (hopper_router.obstacle(x, weight, None, LITE, None, None) is None) == is_few
    with rows_alone():
        assert hopper_router.obstacle(x, weight, None, LITE, None, None) is None
        ids, factors = moe.choose(x, weight, LITE)
        for row in (0, n // 2, n - 1):
            one, its = moe.choose(x[row : row + 1], weight, LITE)
            assert torch.equal(one[0], ids[row]) and torch.equal(its[0], factors[row])
    if is_few:
        got = moe.choose(x, weight, LITE)
        assert torch.equal(got[0], ids) and torch.equal(got[1], factors)


@pytest.mark.parametrize("n", [1, 40])
def test_a_graph_behind_a_norm_and_before_experts(n: int) -> None:
    """x is written by the grid before, and the ids are read by the one behind, which both may overlap with it."""
    torch.manual_seed(2)
    given = torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(64, 2048, device="cuda") * 2048**-0.5
    up, down = (torch.randn(64, *size, device="cuda", dtype=given.dtype) * 0.02 for size in ((512, 2048), (2048, 256)))
    load = torch.zeros(64, dtype=torch.int64, device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        x, found = given, []
        for _ in range(4):
            x = rms_norm(x, scale, 1e-6)
            ids, factors = moe.choose(x, weight, LITE, None, load)
            x = x + moe.experts(x, ids, factors, up, down)
            found += [ids, factors]
        return x, *found

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(20):
        given.copy_(torch.randn_like(given))
        load.zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert int(load.sum()) == 4 * 6 * n
        for got, wanted in zip(captured, run(), strict=True):
            assert torch.equal(got, wanted)
        x = rms_norm(given, scale, 1e-6)
        factors = reference.choose(x.double(), weight.double(), None, LITE, None, None)[1]
        assert float((captured[2] - factors).abs().max()) <= 2e-5
