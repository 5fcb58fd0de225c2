"""Mixtures of experts on a real GPU, every implementation: against float64, captured, with poisoned memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import coded_experts
import pytest
import torch
from coded_experts import check, error

from quire.config.experts import Gating, RoutingSpec, Scores
from quire.kernels import catalog, moe
from quire.kernels.hopper import machine_obstacle
from quire.kernels.invariance import rows_alone
from quire.kernels.moe import hopper, reference
from quire.kernels.w8a8.reference import quantise

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
IN_E4M3 = [one for one in coded_experts.CODINGS if one.dtype.is_floating_point]
in_each_form = pytest.mark.parametrize("coding", [None, *IN_E4M3], ids=["floating", "e4m3", "e4m3 blocks"])


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


def small(n: int, k: int, n_experts: int, coding: coded_experts.Coding | None) -> list:
    """x, ids, weights, up, down of [256, 128], in bfloat16 or in codes."""
    x, ids, weights, up, down, *_ = case(n, k, n_experts, 256, 128, torch.bfloat16)
    if coding is not None:
        up, down = (coding.matrices(*one.shape, torch.bfloat16, "cuda") for one in (up, down))
    return [x, ids, weights, up, down]


def expected_of(x, ids, weights, up, down, up_bias, down_bias, gating: Gating) -> torch.Tensor:
    wide = [None if one is None else one.double() for one in (x, up, down, up_bias, down_bias)]
    return reference.experts(wide[0], ids, weights, wide[1], wide[2], gating, wide[3], wide[4])


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
        before = residual.clone()
        assert experts(x, ids, weights, up, down, gating, **biases, residual=residual) is residual
        assert error(residual, expected, before) <= reference.TOLERANCE[dtype]
        assert torch.equal(experts(x, ids, weights, up, down, gating, **biases), got), "the same bits at every call"


@in_each_form
def test_uneven_choices(experts: Run, coding: coded_experts.Coding | None) -> None:
    """All tokens to one expert, experts without tokens, tokens without an expert, none at all."""
    x, ids, weights, up, down = small(200, 2, 16, coding)
    for fill in ("one", "none", "some"):
        if fill == "one":
            ids[:, 0], ids[:, 1] = 3, 9
        elif fill == "none":
            ids[:] = -1
        else:
            ids[::3] = -1
            ids[1::3, 1] = 5
            ids[1::3, 0] = -1
        expected = coded_experts.expected(x, ids, weights, up, down, moe.SWIGLU, None, None)
        got = experts(x, ids, weights.masked_fill(ids < 0, torch.nan), up, down, moe.SWIGLU)
        check(got, expected, coding, fill)


@pytest.mark.parametrize("n", [20, 700])
@in_each_form
def test_poisoned_memory_does_not_show(experts: Run, coding: coded_experts.Coding | None, n: int) -> None:
    """Scratch memory that held NaN, and experts that nobody chose, which are NaN."""
    x, ids, weights, up, down = small(n, 2, 12, coding)
    ids[ids == 7] = -1
    expected = coded_experts.expected(x, ids, weights, up, down, moe.SWIGLU, None, None)
    for one in (up, down):
        (one if coding is None else one.scales)[7] = torch.nan
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
    del junk
    out = torch.full_like(x.contiguous(), torch.nan)
    check(experts(x, ids, weights, up, down, moe.SWIGLU, out=out), expected, coding)


@pytest.mark.parametrize("n", [24, 600])
@in_each_form
def test_replays_with_other_choices(experts: Run, coding: coded_experts.Coding | None, n: int) -> None:
    x, ids, weights, up, down = small(n, 4, 16, coding)
    experts(x, ids, weights, up, down, moe.SWIGLU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = experts(x, ids, weights, up, down, moe.SWIGLU)
    for _ in range(3):
        ids.copy_(torch.rand(n, 16, device="cuda").argsort(1)[:, :4])
        x.normal_()
        graph.replay()
        check(got, coded_experts.expected(x, ids, weights, up, down, moe.SWIGLU, None, None), coding)


@in_each_form
def test_rows_alone(experts: Run, coding: coded_experts.Coding | None) -> None:
    x, ids, weights, up, down = small(400, 4, 16, coding)
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
@pytest.mark.parametrize("coding", coded_experts.CODINGS, ids=lambda one: f"{one.kind.value} {one.group}")
def test_experts_in_codes_match_float64(
    experts: Run, coding: coded_experts.Coding, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    n_experts, hidden, inner = size[2:]
    if coding.group and (hidden % coding.group or inner % coding.group) and coding.kind is moe.Codes.INT4:
        pytest.skip("groups that are not whole")
    for gating, biased in ((moe.SWIGLU, False), (CLAMPED, True)):
        x, ids, weights, _, _, up_bias, down_bias = case(*size, dtype, biased)
        up = coding.matrices(n_experts, 2 * inner, hidden, dtype, "cuda")
        down = coding.matrices(n_experts, hidden, inner, dtype, "cuda")
        expected = coded_experts.expected(x, ids, weights, up, down, gating, up_bias, down_bias)
        biases = {"up_bias": up_bias, "down_bias": down_bias}
        got = experts(x, ids, weights, up, down, gating, **biases)
        check(got, expected, coding, coding)
        residual = torch.randn_like(got)
        before = residual.clone()
        added = experts(x, ids, weights, up, down, gating, **biases, residual=residual)
        check(added, expected, coding, coding, before)
        assert torch.equal(experts(x, ids, weights, up, down, gating, **biases), got), "the same bits at every call"


@pytest.mark.parametrize("coding", IN_E4M3, ids=["rows", "blocks"])
def test_rows_are_rounded_at_any_number_of_them(experts: Run, coding: coded_experts.Coding) -> None:
    """The kernels for a lone row, for few and for many give the same but for the last digits."""
    x, ids, weights, _, _, *_ = case(3000, 4, 16, 1024, 512, torch.bfloat16)
    up, down = (coding.matrices(16, *size, torch.bfloat16, "cuda") for size in ((1024, 1024), (1024, 512)))
    expected = coded_experts.expected(x, ids, weights, up, down, moe.SWIGLU, None, None)
    for n in (1, 2, 7, 40, 64, 200, 1000, 3000):
        check(experts(x[:n], ids[:n], weights[:n], up, down, moe.SWIGLU), expected[:n], coding, n)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_of_rows_are_those_of_the_reference(in_blocks: bool, dtype: torch.dtype) -> None:
    """What the Hopper kernel for many rows is given, digit for digit."""
    if found := machine_obstacle():
        pytest.skip(found)
    for n, k in ((1, 64), (700, 2048), (33, 7168), (5, 448)):
        x = torch.randn(n, k, device="cuda").mul_(torch.rand(n, 1, device="cuda").mul_(10).exp_()).to(dtype)
        x[-1, k // 2 :] = 0
        made = hopper.round_rows(hopper._function("moe_round.cu", hopper._definitions(dtype)), x, in_blocks)
        codes, scales = quantise(x, torch.float8_e4m3fn, 128 if in_blocks else k)
        assert torch.equal(made.numbers.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(made.scales[:, :n], scales.T) if in_blocks else torch.equal(made.scales, scales[:, 0])
