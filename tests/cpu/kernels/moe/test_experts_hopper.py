"""The kernels of experts on Hopper without a GPU: emulated on the host, against float64.

Not shown: how fast they are, blocks that wait for one another, that copies and products are ordered as on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import shared_cases
import torch
from coded_experts import CODINGS, Coding, error, expected
from emulation import emulated_library, emulated_sources, share_memory

from quire.config.experts import Gating
from quire.kernels import moe
from quire.kernels.moe import hopper, hopper_shared, reference
from quire.kernels.moe.plan import (
    CODES_CUTS,
    LONE_CODES_CUTS,
    N_SCALES,
    CodesCut,
    ExpertsShape,
    FewPlan,
    WidePlan,
    codes_plan,
    plan,
    shared_bytes,
)
from quire.kernels.w8a8.reference import quantise

SHARED = "extern __shared__ __align__(1024) char shared[];"
CLAMPED = Gating(slope=1.702, offset=1.0, limit=1.0)


@dataclasses.dataclass(frozen=True)
class One:
    n: int
    dtype: torch.dtype
    coding: Coding | None
    gating: Gating = moe.SWIGLU
    wide_tokens: int = 0
    """Of the kernel for many rows; 0: the one for few."""
    codes_cut: CodesCut | None = None
    """None: that of the plan."""
    routing: str = "random"

    def ids(self, k: int, n_experts: int) -> torch.Tensor:
        """[n, k] int32."""
        chosen = torch.rand(self.n, n_experts).argsort(1)[:, :k].int().contiguous()
        if self.routing == "all to one":
            chosen[:, 0], chosen[:, 1:] = 1, -1
        elif self.routing == "holes":
            chosen[chosen == 1] = -1
        return chosen


CASES = [  # a lone row and several; each kind of codes and of scales
    One(1, torch.bfloat16, None, CLAMPED),
    One(20, torch.bfloat16, None, CLAMPED),  # a third eight of a tile
    One(20, torch.float16, None, routing="all to one"),
    One(4, torch.bfloat16, CODINGS[1], CLAMPED),
    One(12, torch.float16, CODINGS[2], CLAMPED, routing="all to one"),  # more than eight of a tile
    One(3, torch.bfloat16, None, CLAMPED, wide_tokens=64),
    One(70, torch.float16, None, wide_tokens=64, routing="all to one"),  # two tiles of about as many rows
    One(147, torch.bfloat16, None, wide_tokens=160, routing="all to one"),
    One(5, torch.bfloat16, CODINGS[2], CLAMPED, wide_tokens=64, routing="holes"),
    One(70, torch.bfloat16, CODINGS[1], CLAMPED, wide_tokens=128),
    One(3, torch.float16, CODINGS[3], wide_tokens=64),
    One(70, torch.bfloat16, CODINGS[6], wide_tokens=128),
    One(3, torch.float16, CODINGS[0], CLAMPED, wide_tokens=64),
    One(1, torch.bfloat16, CODINGS[6], codes_cut=LONE_CODES_CUTS[2]),
    One(1, torch.float16, CODINGS[4], codes_cut=LONE_CODES_CUTS[0]),
    One(12, torch.bfloat16, CODINGS[6], CLAMPED, routing="all to one", codes_cut=CODES_CUTS[0]),
    One(4, torch.float16, CODINGS[3], CLAMPED, codes_cut=CODES_CUTS[1]),
    One(4, torch.bfloat16, CODINGS[2], codes_cut=CODES_CUTS[2]),
    One(4, torch.bfloat16, CODINGS[4], codes_cut=CODES_CUTS[3]),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """In place of `hopper._function`."""
    folder = emulated_sources(tmp_path_factory.mktemp("experts"))
    for name in ("codes.h", "wide_memory.h"):
        (folder / "gemm" / name).write_text('#include "../gemm.h"')
    for name in ("moe_few.cu", "moe_wide.cu"):
        share_memory(folder / name, SHARED, "shared")

    @functools.cache
    def function(name: str, definitions: tuple[str, ...]) -> ctypes.CDLL:
        library = emulated_library(folder / name, str(abs(hash((name, definitions)))), *definitions)
        made = getattr(library, f"quire_{name.removesuffix('.cu')}")
        made.library = library
        return made

    return function


@pytest.fixture
def emulation(built: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        made.view(torch.uint8).fill_(0xFF)  # NaN, of all types
        return made

    empty = torch.empty
    monkeypatch.setattr(hopper, "_function", built)
    monkeypatch.setattr(hopper.torch, "empty", poisoned)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


def view(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """What lies there."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class Rows:
    """In place of moe_rows.cu, whose work is not shown here."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def quire_moe_sort(self, given: Any, stream: object) -> int:
        args = given._obj
        ids = view(args.expert_ids, torch.int32, args.n_pairs).tolist()
        order = sorted(range(args.n_pairs), key=lambda pair: (ids[pair], pair))
        ranks, tiles, first = view(args.ranks, torch.int32, args.n_pairs), [], 0
        starts = view(args.starts, torch.int32, args.n_experts)
        for expert in range(args.n_experts):
            own = [pair for pair in order if ids[pair] == expert]
            starts[expert], end = first, first + len(own)
            ranks[own] = torch.arange(len(own), dtype=torch.int32)
            n_tiles = -(-len(own) // args.tile_slots)
            while first < end:
                n = min(-(-len(own) // (8 * n_tiles)) * 8, end - first)
                tiles.append([expert, first, n, 0])
                first += n
            first += -first % args.start_step
        view(args.tiles, torch.int32, len(tiles), 4).copy_(torch.tensor(tiles))
        view(args.n_tiles, torch.int32, 1).fill_(len(tiles))
        return 0

    def quire_moe_place(self, given: Any, stream: object) -> int:
        args = given._obj
        n_pairs = args.n_tokens * args.n_chosen
        ids, starts = view(args.expert_ids, torch.int32, n_pairs), view(args.starts, torch.int32, args.n_experts)
        slots, tokens = view(args.slots, torch.int32, n_pairs), view(args.tokens, torch.int32, n_pairs)
        real = ids >= 0
        slots[real] += starts[ids[real].long()]
        tokens[slots[real].long()] = torch.arange(n_pairs, dtype=torch.int32)[real] // args.n_chosen
        return 0

    def quire_moe_sum(self, given: Any, stream: object) -> int:
        args = given._obj
        n, k, h, routed = args.n_tokens, args.n_chosen, args.h, args.n_chosen - args.n_shared
        weights = torch.cat([view(args.weights, torch.float32, n, routed), torch.ones(n, args.n_shared)], 1)
        ids = view(args.expert_ids, torch.int32, n, routed)
        real = torch.cat([ids >= 0, torch.ones(n, args.n_shared, dtype=torch.bool)], 1)[:, :, None]
        slots = torch.arange(n * k)
        if args.slots:  # of a pair without an expert anything
            slots = view(args.slots, torch.int32, n * k).long().where(real.flatten(), torch.zeros(()).long())
        x = view(args.x, self.dtype, int(slots.max()) + 1, h)[slots].float()
        each = (x.view(n, k, h) * weights[:, :, None]).where(real, torch.zeros(()))
        total = view(args.residual, self.dtype, n, h) + each.sum(1)
        view(args.y, self.dtype, n, h).copy_(total)
        return 0


@pytest.mark.parametrize("one", CASES, ids=str)
def test_experts_match_float64(emulation: None, one: One) -> None:
    torch.manual_seed(0)
    coding = one.coding
    k, n_experts, hidden, inner = 2, 3, 576, 192 if coding is not None and coding.dtype.is_floating_point else 64
    inner = 576 if one.codes_cut is not None else inner
    x, biases = torch.randn(one.n, hidden + 8).to(one.dtype)[:, :hidden], (None, None)
    if one.gating is CLAMPED:
        biases = torch.randn(n_experts, 2 * inner).to(one.dtype), torch.randn(n_experts, hidden).to(one.dtype)
    if coding is None:
        up, down = torch.randn(n_experts, 2 * inner, hidden) * 0.04, torch.randn(n_experts, hidden, inner) * 0.1
        up, down = up.to(one.dtype), down.to(one.dtype)
    else:
        sizes = ((2 * inner, hidden), (hidden, inner))
        up, down = (coding.matrices(n_experts, *size, one.dtype) for size in sizes)
    ids = one.ids(k, n_experts)
    weights, residual = torch.rand(one.n, k), torch.randn(one.n, hidden).to(one.dtype)
    shape = ExpertsShape(one.n, k, n_experts, hidden, inner, hopper._codes(down))
    cut = WidePlan(one.wide_tokens) if one.wide_tokens else plan(shape)
    if one.codes_cut is not None:
        assert isinstance(cut, FewPlan)
        cut = dataclasses.replace(
            codes_plan(shape, cut.tokens, cut.lone, one.codes_cut, N_SCALES[1]),
            n_stages=max(4, one.codes_cut.min_stages),
        )
    assert one.wide_tokens or (isinstance(cut, FewPlan) and cut.lone == (one.n == 1))
    products = tuple(hopper._function(*each) for each in hopper.variants(cut, one.dtype, shape.codes))
    rounds = hopper._function("moe_round.cu", hopper._definitions(one.dtype)) if shape.codes.is_rounded else None
    launch = hopper.Launch(products, Rows(one.dtype), cut, n_blocks=1, round=rounds)
    sums, before = expected(x, ids, weights, up, down, one.gating, *biases), residual.clone()
    found = error(launch(x, ids, weights, up, down, one.gating, *biases, residual=residual), sums, before)
    assert found <= reference.TOLERANCE[one.dtype], found
    if isinstance(cut, FewPlan):
        asked = ctypes.c_size_t.in_dll(products[0].library, "emulated_shared_bytes").value
        assert asked == shared_bytes(shape, cut), "what the plan expects decides how many stages there are"


def test_pairs_of_many_experts_in_several_tiles(emulation: None) -> None:
    """Some warps that sort have twice 32 pairs, and some experts more than a tile."""
    torch.manual_seed(0)
    n, k, n_experts, hidden, inner, dtype = 84, 4, 24, 384, 64, torch.bfloat16
    scores = torch.rand(n, n_experts) * torch.linspace(2.0, 1.0, n_experts)
    ids = scores.argsort(1, descending=True)[:, :k].int().contiguous()
    ids[::7, 3] = -1
    x, up = torch.randn(n, hidden).to(dtype), (torch.randn(n_experts, 2 * inner, hidden) * 0.1).to(dtype)
    down, residual = (torch.randn(n_experts, hidden, inner) * 0.1).to(dtype), torch.randn(n, hidden).to(dtype)
    weights, cut = torch.rand(n, k), plan(ExpertsShape(n, k, n_experts, hidden, inner))
    counts = ids[ids >= 0].bincount()
    assert isinstance(cut, FewPlan) and cut.tokens == 24 < int(counts.max())
    sums, before = expected(x, ids, weights, up, down, moe.SWIGLU), residual.clone()
    products = tuple(hopper._function(*each) for each in hopper.variants(cut, dtype))
    launch = hopper.Launch(products, Rows(dtype), cut, n_blocks=1)
    got = launch(x, ids, weights, up, down, moe.SWIGLU, residual=residual)
    assert error(got, sums, before) <= reference.TOLERANCE[dtype]


def test_few_and_many_rows_in_e4m3_give_the_same(emulation: None) -> None:
    """Both kernels multiply the same codes by the same scales, and sum in another order."""
    torch.manual_seed(0)
    k, n_experts, hidden, inner, dtype, coding = 2, 3, 576, 192, torch.bfloat16, CODINGS[2]
    up, down = (coding.matrices(n_experts, *size, dtype) for size in ((2 * inner, hidden), (hidden, inner)))
    x, weights, none = torch.randn(4, hidden).to(dtype), torch.rand(4, k), torch.zeros(4, hidden).to(dtype)
    ids = torch.rand(4, n_experts).argsort(1)[:, :k].int().contiguous()
    found = []
    for n, cut in ((4, WidePlan(64)), (4, None), (1, None)):
        shape = ExpertsShape(n, k, n_experts, hidden, inner, hopper._codes(down))
        made = cut or plan(shape)
        products = tuple(hopper._function(*each) for each in hopper.variants(made, dtype, shape.codes))
        rounds = hopper._function("moe_round.cu", hopper._definitions(dtype))
        launch = hopper.Launch(products, Rows(dtype), made, n_blocks=1, round=rounds)
        parts = [one[:n].contiguous() for one in (x, ids, weights)]
        found.append(launch(*parts, up, down, moe.SWIGLU, residual=none[:n].clone()).double())
    many, few, lone = found
    assert float((few - many).norm() / many.norm()) < 1e-3
    assert float((lone - many[:1]).norm() / many[:1].norm()) < 4e-3, "which rounds no expert's output"


@pytest.mark.parametrize(("dtype", "in_blocks"), [(torch.bfloat16, False), (torch.float16, True)], ids=str)
def test_codes_of_rows_are_those_of_the_reference(emulation: None, dtype: torch.dtype, in_blocks: bool) -> None:
    """Digit for digit: rows of very different sizes, one with a half of zeros, and columns that fill no group."""
    n, k = 6, 1216
    x = torch.randn(n, k).mul_(torch.tensor([1e-3, 1e-2, 1.0, 30.0, 1e3, 1.0])[:, None]).to(dtype)
    x[-1, k // 2 :] = 0
    made = hopper.round_rows(hopper._function("moe_round.cu", hopper._definitions(dtype)), x, in_blocks)
    codes, scales = quantise(x, torch.float8_e4m3fn, 128 if in_blocks else k)
    assert torch.equal(made.numbers.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(made.scales[:, :n], scales.T) if in_blocks else torch.equal(made.scales, scales[:, 0])


@pytest.mark.parametrize("shape", shared_cases.SHAPES, ids=str)
def test_what_all_tokens_share_is_read_as_experts(emulation: None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if shape[0] == 1 else torch.float16
    given = shared_cases.arguments(shape, dtype)
    x, ids, weights, up, down, *shared, residual = given
    sums, before = shared_cases.expected(*given[:-1]), residual.clone()
    cut = plan(hopper.shape_of(ids, down, shape[5]))
    assert isinstance(cut, FewPlan) and cut.lone == (shape[0] == 1) and cut.tokens >= shape[0]
    products = tuple(hopper._function(*each) for each in hopper.variants(cut, dtype))
    launch = hopper_shared.SharedLaunch(hopper.Launch(products, Rows(dtype), cut, n_blocks=1))
    got = launch(x, ids, weights, up, down, *shared, residual)
    assert got is residual and error(got, sums, before) <= reference.TOLERANCE[dtype]


def test_when_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(shape: tuple[int, ...], parts: int = 0) -> str | None:
        x, ids, weights, up, down, shared_up, shared_down, residual = shared_cases.arguments(shape, torch.bfloat16)
        size = parts or shared_down.shape[1]
        return hopper_shared.static_obstacle(
            x, ids, weights, up, down, shared_up[: 2 * size], shared_down[:, :size], residual
        )

    assert why((8, 2, 3, 64, 64, 2)) is None
    assert isinstance(why((9, 2, 3, 64, 64, 2)), hopper_shared.Slower)
    assert "not a multiple of an expert's 64" in str(why((2, 2, 3, 64, 64, 2), parts=96))
    assert "at most 32" in str(why((1, 31, 40, 64, 64, 2)))
