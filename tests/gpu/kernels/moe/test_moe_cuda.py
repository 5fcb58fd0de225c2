"""Experts on a real GPU: against float64 over all kinds of routing, poisoned memory, graphs, the same bits twice."""

from __future__ import annotations

import pytest
import torch
from coded_experts import error

from quire.config.experts import Gating
from quire.kernels import catalog, moe
from quire.kernels.moe import hopper, reference
from quire.kernels.moe.plan import WIDE_TOKENS, ExpertsShape, FewPlan, WidePlan, few_plan, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle())),
]

SHAPES = [  # n, chosen, experts, hidden, inner
    (1, 8, 128, 2048, 768),
    (1, 6, 64, 2048, 1408),
    (1, 1, 3, 64, 64),
    (2, 2, 8, 512, 1408),
    (7, 4, 5, 320, 192),
    (20, 8, 16, 320, 192),
    (33, 8, 128, 512, 256),
    (100, 8, 16, 1024, 448),
    (128, 6, 64, 2048, 1408),
    (256, 8, 128, 512, 768),
    (700, 2, 6, 256, 320),
    (1000, 8, 64, 512, 128),
    (8192, 8, 128, 256, 192),
]
ROUTINGS = ["uniform", "one", "skewed", "holes"]
Arguments = tuple[torch.Tensor, ...]


def routed(n: int, k: int, n_experts: int, routing: str) -> torch.Tensor:
    """Distinct ids of each row, some of them -1 where there are holes."""
    scores = torch.rand(n, n_experts, device="cuda")
    if routing == "one":
        scores = scores[:1].expand(n, -1)
    elif routing == "skewed":
        scores = scores * torch.rand(n_experts, device="cuda") ** 4
    ids = scores.argsort(1, descending=True)[:, :k].int().contiguous()
    if routing == "holes":
        ids[torch.rand(n, k, device="cuda") < 0.3] = -1
        ids[n // 2] = -1
    return ids


def arguments(shape: tuple[int, ...], routing: str, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    """x, ids, weights, up, down; what must not be read is NaN: experts and tokens that are not routed."""
    n, k, n_experts, hidden, inner = shape
    ids = routed(n, k, n_experts, routing)
    x = torch.randn(n, hidden, device="cuda", dtype=dtype)
    up = torch.randn(n_experts, 2 * inner, hidden, device="cuda", dtype=dtype) * hidden**-0.5
    down = torch.randn(n_experts, hidden, inner, device="cuda", dtype=dtype) * 2 * inner**-0.5
    weights = torch.rand(n, k, device="cuda")
    weights[ids < 0] = torch.nan
    x[(ids < 0).all(1)] = torch.nan
    used = torch.zeros(n_experts, dtype=torch.bool, device="cuda")
    used[ids[ids >= 0].long()] = True
    up[~used], down[~used] = torch.nan, torch.nan
    return x, ids, weights, up, down


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
    return reference.experts(x.double(), ids, weights.double(), up.double(), down.double(), Gating())


def poison() -> None:
    """What torch hands out next is NaN."""
    blocks = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(12, 26)]
    blocks.clear()


def plans(shape: tuple[int, ...]) -> list[FewPlan | WidePlan]:
    """The one that is taken, and all others that can be."""
    cut = ExpertsShape(*shape)
    found = {plan(cut), few_plan(cut), *map(WidePlan, WIDE_TOKENS)}
    return [one for one in found if one is not None]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_plan_matches_float64_with_the_same_bits_every_time(shape: tuple[int, ...], routing: str) -> None:
    torch.manual_seed(0)
    tensors = arguments(shape, routing)
    wanted = expected(*tensors)
    torch.cuda.synchronize()
    for cut in plans(shape):
        launch = hopper.load(cut, torch.bfloat16, tensors[0].device)
        poison()
        got = launch(*tensors, Gating(), None, None, None, None)
        assert error(got, wanted) <= reference.TOLERANCE[torch.bfloat16], cut
        for _ in range(3):
            poison()
            assert torch.equal(got, launch(*tensors, Gating(), None, None, None, None)), cut


@pytest.mark.parametrize("n", [1, 5, 600])
def test_the_op_takes_these_kernels_with_a_residual_and_rows_apart(n: int) -> None:
    torch.manual_seed(1)
    shape = (n, 4, 16, 512, 256)
    x, *rest = arguments(shape, "holes", torch.float16)
    rows = torch.full((n, 520), torch.nan, device="cuda", dtype=torch.float16)
    rows[:, :512] = x
    rows = rows[:, :512]
    assert isinstance(hopper.prepare(rows, *rest, Gating(), None, None, None, None), hopper.Launch)
    wanted = expected(x, *rest)
    torch.cuda.synchronize()
    into = torch.randn(n, 1024, device="cuda", dtype=torch.float16)[:, :512]
    before = into.clone()
    assert moe.experts(rows, *rest, residual=into) is into
    assert error(into, wanted, before) <= reference.TOLERANCE[torch.float16]
    out = torch.full_like(x, torch.nan)
    assert moe.experts(rows, *rest, out=out) is out
    assert error(out, wanted) <= reference.TOLERANCE[torch.float16]


@pytest.mark.parametrize("n", [1, 20, 1000])
def test_a_graph_follows_the_routing(n: int) -> None:
    """Two layers, one behind the other, replayed with other ids."""
    torch.manual_seed(2)
    shape = (n, 6, 64, 512, 256)
    x, ids, weights, up, down = arguments(shape, "uniform")
    up, down = (torch.nan_to_num(each) for each in (up, down))
    second_down = down.flip(0)

    def run() -> torch.Tensor:
        y = moe.experts(x, ids, weights, up, down)
        return moe.experts(y, ids, weights, up, second_down)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for routing in ROUTINGS:
        ids.copy_(routed(n, 6, 64, routing))
        weights.copy_(torch.rand_like(weights) / 3)
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(y, run()), routing
        wanted = expected(expected(x, ids, weights, up, down).to(x.dtype), ids, weights, up, second_down)
        assert error(y, wanted) <= 2 * reference.TOLERANCE[torch.bfloat16], routing
