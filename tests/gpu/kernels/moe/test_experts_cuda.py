"""Mixtures of experts on a real GPU, every implementation: against float64, captured, with poisoned memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import coded_experts
import pytest
import torch

from quire.config.experts import Gating, RoutingSpec, Scores
from quire.kernels import catalog, moe
from quire.kernels.invariance import rows_alone
from quire.kernels.moe import reference

pytestmark = pytest.mark.gpu
CLAMPED = Gating(slope=1.702, offset=1.0, limit=2.0)
SIZES = (
    (1, 8, 128, 2048, 768),
    (3, 6, 64, 2048, 1408),
    (33, 2, 8, 512, 320),
    (300, 4, 60, 256, 96),
    (2000, 2, 5, 128, 64),
)
"""Tokens, chosen experts, experts, hidden size, inner size."""
CODED_SIZES = (*SIZES[:3], (1, 4, 16, 2880, 1472), (5, 4, 16, 2880, 1472), (700, 4, 16, 1024, 448))
ROUTINGS = (
    (128, RoutingSpec(n_chosen=8, renormalise=True)),
    (60, RoutingSpec(n_chosen=4)),
    (256, RoutingSpec(n_chosen=8, scores=Scores.SIGMOID, n_groups=8, n_chosen_groups=4, n_group_best=2)),
    (64, RoutingSpec(n_chosen=6, scores=Scores.SIGMOID, renormalise=True)),
    (128, RoutingSpec(n_chosen=8, scores=Scores.EVEN)),
    (160, RoutingSpec(n_chosen=6, n_groups=8, n_chosen_groups=3, scale=16.0)),
    (16, RoutingSpec(n_chosen=2, scores=Scores.SPARSE_MIXER, mixer_margin=0.02)),
)  # fmt: skip
Run = Callable[..., torch.Tensor]


def implementations() -> list[catalog.Implementation]:
    return [one for one in catalog.of("moe", "cuda") if one.name != "reference" and "experts" in one.functions]


@pytest.fixture(params=implementations(), ids=lambda one: one.name)
def experts(request: pytest.FixtureRequest) -> Iterator[Run]:
    """`experts` of one implementation; skips what it does not take."""
    if request.param.machine_obstacle():
        pytest.skip(str(request.param.machine_obstacle()))
    module = request.param.load()
    condition = catalog.condition_of(module)

    def run(*arguments: object, **more: object) -> torch.Tensor:
        whole = (*arguments, *(more.get(name) for name in ("up_bias", "down_bias", "residual", "out")))
        found = None if condition is None else condition(*whole)
        if isinstance(found, str):
            pytest.skip(found)
        result: torch.Tensor = module.experts(*whole)
        return result

    yield run
    torch.cuda.synchronize()


def case(n: int, k: int, n_experts: int, hidden: int, inner: int, dtype: torch.dtype, biased: bool = False) -> list:
    made = functools.partial(torch.randn, device="cuda")
    x = made(n, hidden + 8).to(dtype)[:, :hidden]
    ids = torch.rand(n, n_experts, device="cuda").argsort(1)[:, :k].int().contiguous()
    up, down = made(n_experts, 2 * inner, hidden) * hidden**-0.5, made(n_experts, hidden, inner) * inner**-0.5
    biases = [made(n_experts, 2 * inner).to(dtype), made(n_experts, hidden).to(dtype)] if biased else [None, None]
    return [x, ids, torch.rand(n, k, device="cuda"), up.to(dtype), down.to(dtype), *biases]


def expected_of(x, ids, weights, up, down, up_bias, down_bias, gating: Gating) -> torch.Tensor:
    wide = [None if one is None else one.double() for one in (x, up, down, up_bias, down_bias)]
    return reference.experts(wide[0], ids, weights, wide[1], wide[2], gating, wide[3], wide[4])


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_float64(experts: Run, size: tuple[int, ...], dtype: torch.dtype) -> None:
    for gating, biased in ((moe.SWIGLU, False), (CLAMPED, True)):
        x, ids, weights, up, down, up_bias, down_bias = case(*size, dtype, biased)
        expected = expected_of(x, ids, weights, up, down, up_bias, down_bias, gating)
        biases = {"up_bias": up_bias, "down_bias": down_bias}
        got = experts(x, ids, weights, up, down, gating, **biases)
        assert error(got, expected) <= reference.TOLERANCE[dtype]
        residual = torch.randn_like(got)
        sums = expected + residual.double()
        assert experts(x, ids, weights, up, down, gating, **biases, residual=residual) is residual
        assert error(residual, sums) <= reference.TOLERANCE[dtype]
        assert torch.equal(experts(x, ids, weights, up, down, gating, **biases), got), "the same bits at every call"


def test_uneven_choices(experts: Run) -> None:
    """All tokens to one expert, experts without tokens, tokens without an expert, none at all."""
    x, ids, weights, up, down, *_ = case(200, 2, 16, 256, 128, torch.bfloat16)
    for fill in ("one", "none", "some"):
        if fill == "one":
            ids[:, 0], ids[:, 1] = 3, 9
        elif fill == "none":
            ids[:] = -1
        else:
            ids[::3] = -1
            ids[1::3, 1] = 5
            ids[1::3, 0] = -1
        expected = expected_of(x, ids, weights, up, down, None, None, moe.SWIGLU)
        got = experts(x, ids, weights.masked_fill(ids < 0, torch.nan), up, down, moe.SWIGLU)
        assert error(got, expected) <= reference.TOLERANCE[torch.bfloat16], fill


def test_poisoned_memory_does_not_show(experts: Run) -> None:
    """Scratch memory that held NaN, and experts that nobody chose, which are NaN."""
    x, ids, weights, up, down, *_ = case(20, 2, 12, 256, 128, torch.bfloat16)
    ids[ids == 7] = -1
    expected = expected_of(x, ids, weights, up, down, None, None, moe.SWIGLU)
    up[7], down[7] = torch.nan, torch.nan
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
    del junk
    out = torch.full_like(x.contiguous(), torch.nan)
    assert error(experts(x, ids, weights, up, down, moe.SWIGLU, out=out), expected) <= 3.2e-2


def test_replays_with_other_choices(experts: Run) -> None:
    x, ids, weights, up, down, *_ = case(24, 4, 16, 256, 128, torch.bfloat16)
    experts(x, ids, weights, up, down, moe.SWIGLU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = experts(x, ids, weights, up, down, moe.SWIGLU)
    for _ in range(3):
        ids.copy_(torch.rand(24, 16, device="cuda").argsort(1)[:, :4])
        x.normal_()
        graph.replay()
        expected = expected_of(x, ids, weights, up, down, None, None, moe.SWIGLU)
        assert error(got, expected) <= reference.TOLERANCE[torch.bfloat16]


def test_rows_alone(experts: Run) -> None:
    x, ids, weights, up, down, *_ = case(400, 4, 16, 256, 128, torch.bfloat16)
    with rows_alone():
        whole = experts(x, ids, weights, up, down, moe.SWIGLU)
        for rows in (slice(0, 1), slice(5, 12), slice(100, 300)):
            part = [one[rows].contiguous() for one in (x, ids, weights)]
            assert torch.equal(experts(*part, up, down, moe.SWIGLU), whole[rows])


@pytest.mark.parametrize(("n_experts", "routing"), ROUTINGS, ids=str)
def test_choice_is_that_of_the_reference(n_experts: int, routing: RoutingSpec) -> None:
    logits = torch.randn(500, n_experts, device="cuda") * 3
    correction = None if routing.scores is Scores.SPARSE_MIXER else torch.randn(n_experts, device="cuda") * 0.1
    ids, weights = moe.route(logits, routing, correction)
    expected_ids, _ = reference.route(logits, routing, correction)
    wide = None if correction is None else correction.double()
    _, expected = reference.route(logits.double(), routing, wide)
    same = (ids == expected_ids).all(dim=1)
    assert float(same.double().mean()) > 0.99, "scores that differ by a rounding may change places"
    assert (weights[same] - expected[same]).abs().max() <= reference.ROUTE_TOLERANCE * routing.scale
    logits[0], logits[1, ::2] = torch.nan, torch.inf
    strange, _ = moe.route(logits, routing, correction)
    assert all(len(set(row)) == routing.n_chosen and min(row) >= 0 for row in strange[:2].tolist())
    assert int(strange.max()) < n_experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", CODED_SIZES, ids=str)
def test_experts_in_codes_match_float64(experts: Run, size: tuple[int, ...], dtype: torch.dtype) -> None:
    n_experts, hidden, inner = size[2:]
    for coding in coded_experts.CODINGS:
        if coding.group and (hidden % coding.group or inner % coding.group) and coding.kind is moe.Codes.INT4:
            continue
        for gating, biased in ((moe.SWIGLU, False), (CLAMPED, True)):
            x, ids, weights, _, _, up_bias, down_bias = case(*size, dtype, biased)
            up = coding.matrices(n_experts, 2 * inner, hidden, dtype, "cuda")
            down = coding.matrices(n_experts, hidden, inner, dtype, "cuda")
            wide = [coded_experts.wide(one) for one in (up, down)]
            expected = expected_of(x, ids, weights, *wide, up_bias, down_bias, gating)
            biases = {"up_bias": up_bias, "down_bias": down_bias}
            got = experts(x, ids, weights, up, down, gating, **biases)
            allowed = reference.TOLERANCE[dtype] * max(1.0, float(expected.std()))  # zero points make large sums
            assert error(got, expected) <= allowed, coding
            residual = torch.randn_like(got)
            wanted = expected + residual.double()  # the kernel adds to it in place
            sums = experts(x, ids, weights, up, down, gating, **biases, residual=residual)
            assert error(sums, wanted) <= allowed, coding
            assert torch.equal(experts(x, ids, weights, up, down, gating, **biases), got), "the same bits at every call"
