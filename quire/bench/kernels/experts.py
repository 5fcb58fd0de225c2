"""Cases of mixtures of experts: the choice, and the products with even routing, of models that have many.

Torch's reference reads the choice on the host. Bytes are those of the experts that are chosen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from quire.bench.kernels.case import Case, Check, Contender, NotRun, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.timing import Call
from quire.config.experts import Gating, RoutingSpec
from quire.kernels import catalog, lora, nibbles, qgemm
from quire.kernels.lora.weight import blocks_of
from quire.kernels.moe import SWIGLU, CodedMatrices, Codes, ExpertAdapters, PackedExperts, reference
from quire.kernels.w8a8 import BLOCK

CHOICES = 256
"""Tokens of the cases of the choice."""
ROUTED = (1, 32, 256)
"""Rows of the cases of the router's product and the choice."""
SHARED = {"deepseek-v2-lite": 2}
"""How many experts what all tokens share is as large as."""
WITH_SHARED = (1, 8)
"""Rows of the cases of both in one call."""
CODES = {"mxfp4": 4.25, "int4 g128": 4.125, "fp8": 8.0, "fp8 blocks": 8.0}
"""How matrices are kept on a GPU → bits a weight."""
IN_E4M3 = ("fp8", "fp8 blocks")
"""Of them those whose rows are rounded to the same: a GPU makes twice as many of such products as of bf16, of which a
run measures the rate."""
N_ADAPTERS, RANK, ADAPTED = 4, 16, (8, 256)
"""Of the cases with adapters; ADAPTED: rows. Bytes are those of the experts alone."""
PACKED = "int4"
"""How matrices are packed for the CPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Experts of one layer."""

    n_experts: int
    n_chosen: int
    hidden: int
    inner: int

    @property
    def numbers(self) -> int:
        """Of one expert."""
        return 3 * self.inner * self.hidden


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "olmoe-1b-7b": Shape(64, 8, 2048, 1024),
}
SIZES = {"cuda": (("qwen3-30b-a3b", "deepseek-v2-lite"), (1, 8, 32, 256, 2048, 8192)), "cpu": (("olmoe-1b-7b",), (1,))}
QUICK = ("qwen3-30b-a3b, 32 rows", "olmoe-1b-7b, 1 rows")
SMALL = {
    "swiglu": (Shape(6, 2, 64, 48), SWIGLU, 9),
    "clamped, many rows": (Shape(5, 3, 80, 32), Gating(slope=1.7, offset=1.0, limit=2.0), 300),
}
Arguments = tuple[Any, ...]


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """The choice of some tokens, and the products of few tokens and many."""
    names, rows = SIZES[setting.device.type]
    for name in names:
        shape = SHAPES[name]
        choose = functools.partial(_contenders, "route", functools.partial(_choice, shape, setting), 0.0, setting)
        moved = Work(4.0 * CHOICES * shape.n_experts, 8.0 * CHOICES * shape.n_chosen)
        yield Case(op, f"{name}, choice of {CHOICES} rows", moved, choose)
        for n in ROUTED:
            router_bytes = 4.0 * shape.n_experts * shape.hidden
            moved = Work(router_bytes + 2.0 * n * shape.hidden, 8.0 * n * shape.n_chosen)
            make = functools.partial(_routed, shape, n, setting)
            choose = functools.partial(_contenders, "choose", make, 0.0, setting)
            yield Case(op, f"{name}, router and choice of {n} rows", moved, choose)
        for n in WITH_SHARED if name in SHARED and setting.device.type == "cuda" else ():
            w_bytes = float(
                setting.element_bytes * shape.numbers * (min(shape.n_experts, n * shape.n_chosen) + SHARED[name])
            )
            with_shared = functools.partial(_with_shared, shape, SHARED[name], n, setting)
            contenders = functools.partial(_contenders, "experts_with_shared", with_shared, w_bytes, setting)
            yield Case(op, f"{name} and what all share, {n} rows", Work(w_bytes), contenders)
        for n in rows:
            w_bytes = float(setting.element_bytes * shape.numbers * min(shape.n_experts, n * shape.n_chosen))
            x_bytes = float(setting.element_bytes * n * shape.hidden)
            work = Work(w_bytes + x_bytes, x_bytes, 2.0 * n * shape.n_chosen * shape.numbers)
            make = functools.partial(_products, shape, SWIGLU, n, setting)
            contenders = functools.partial(_contenders, "experts", make, w_bytes, setting)
            yield Case(op, f"{name}, {n} rows", work, contenders, in_flops=n > 1000, quick=f"{name}, {n} rows" in QUICK)
            for form, n_bits in CODES.items() if setting.device.type == "cuda" else ():
                coded = functools.partial(_in_codes, form, make)
                contenders = functools.partial(_contenders, "experts", coded, w_bytes, setting)
                flops = work.flops * (0.5 if form in IN_E4M3 else 1.0)
                moved = Work(w_bytes * n_bits / 8 / setting.element_bytes + x_bytes, x_bytes, flops)
                yield Case(op, f"{name} {form}, {n} rows", moved, contenders, in_flops=n > 1000)
            if setting.device.type == "cuda" and n in ADAPTED:
                own = functools.partial(_adapted, shape, SWIGLU, n, setting)
                contenders = functools.partial(_contenders, "adapted_experts", own, w_bytes, setting)
                yield Case(op, f"{name}, {N_ADAPTERS} adapters, {n} rows", work, contenders)
            if setting.device.type == "cpu":
                pack = functools.partial(_contenders, "packed_experts", functools.partial(_packed, make), 0.0, setting)
                n_bytes = w_bytes / setting.element_bytes * qgemm.SCHEMES[PACKED].bytes_per_weight
                work = Work(n_bytes + x_bytes, x_bytes, work.flops)
                yield Case(op, f"{name} {PACKED}, {n} rows", work, pack)


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """The products at small sizes, an assignment that is none among them."""
    for name, (shape, gating, n) in SMALL.items():
        for implementation in catalog.runnable(op, setting.device.type):
            is_fast = implementation.name != "reference"
            if is_fast and "adapted_experts" in implementation.functions:
                error = functools.partial(_adapted_error, shape, gating, n, setting, implementation)
                yield Check(op, f"{name}, adapters", implementation.name, error, reference.TOLERANCE[setting.dtype])
            if is_fast and "experts" in implementation.functions:
                for form in ("", *CODES):
                    error = functools.partial(_error, shape, gating, n, setting, implementation, form)
                    case = f"{name} {form}".rstrip()
                    allowed = reference.TOLERANCE[setting.dtype]
                    if form in IN_E4M3:
                        allowed = max(allowed, reference.ROUNDED_TOLERANCE)
                    yield Check(op, case, implementation.name, error, allowed)
            elif is_fast and "packed_experts" in implementation.functions and gating == SWIGLU:
                error = functools.partial(_packed_error, shape, n, setting, implementation)
                yield Check(op, f"{name} {PACKED}", implementation.name, error, reference.TOLERANCE[setting.dtype])


def _choice(shape: Shape, setting: Setting) -> Arguments:
    logits = setting.randn(CHOICES, shape.n_experts, dtype=torch.float32)
    return logits, RoutingSpec(n_chosen=shape.n_chosen, renormalise=True), None


def _routed(shape: Shape, n: int, setting: Setting) -> Arguments:
    """x, router, bias, routing, correction, load."""
    router = setting.randn(shape.n_experts, shape.hidden, dtype=torch.float32).mul_(shape.hidden**-0.5)
    return setting.randn(n, shape.hidden), router, None, RoutingSpec(n_chosen=shape.n_chosen), None, None


def _products(shape: Shape, gating: Gating, n: int, setting: Setting) -> Arguments:
    """x, expert_ids, weights, up, down, gating; experts are taken in turn, so that they are chosen evenly."""
    taken = torch.arange(n * shape.n_chosen, dtype=torch.int32) % shape.n_experts
    weights = torch.full((n, shape.n_chosen), 1 / shape.n_chosen, device=setting.device)
    up = setting.randn(shape.n_experts, 2 * shape.inner, shape.hidden).mul_(shape.hidden**-0.5)
    down = setting.randn(shape.n_experts, shape.hidden, shape.inner).mul_(shape.inner**-0.5)
    expert_ids = taken.view(n, shape.n_chosen).to(setting.device)
    return setting.randn(n, shape.hidden), expert_ids, weights, up, down, gating


def _with_shared(shape: Shape, n_shared: int, n: int, setting: Setting) -> Arguments:
    """x, expert_ids, weights, up, down, shared_up, shared_down, residual."""
    x, *others, _ = _products(shape, SWIGLU, n, setting)
    size = n_shared * shape.inner
    shared_up = setting.randn(2 * size, shape.hidden).mul_(shape.hidden**-0.5)
    return x, *others, shared_up, setting.randn(shape.hidden, size).mul_(size**-0.5), torch.zeros_like(x)


def _in_codes(form: str, make: Callable[[], Arguments]) -> Arguments:
    """The same with random codes for the matrices."""
    x, expert_ids, weights, up, down, gating = make()
    return x, expert_ids, weights, *(_coded(form, one) for one in (up, down)), gating


def _coded(form: str, like: torch.Tensor) -> CodedMatrices:
    """For activations of its dtype, of about the size of its numbers."""
    (n_experts, n, k), device, size = like.shape, like.device, like.shape[2] ** -0.5
    if form in IN_E4M3:
        codes = torch.randint(-100, 101, (n_experts, n, k), device=device, dtype=torch.int8).half()
        lines, group = ((-(-n // BLOCK), -(-k // BLOCK)), BLOCK) if form == "fp8 blocks" else ((n,), 0)
        scales = torch.full((n_experts, *lines), size / 60, device=device)
        return CodedMatrices(Codes.BYTES, k, codes.to(torch.float8_e4m3fn), scales, group)
    words = torch.randint(-(1 << 31), 1 << 31, (n_experts, n, nibbles.n_words(k)), device=device, dtype=torch.int32)
    if form == "mxfp4":
        exponents = torch.full((n_experts, n, -(-k // 32)), 122, device=device, dtype=torch.uint8)
        return CodedMatrices(Codes.FP4, k, words, exponents, 32)
    scales = torch.full((n_experts, n, -(-k // BLOCK)), size / 5, device=device, dtype=like.dtype)
    return CodedMatrices(Codes.INT4, k, words, scales, BLOCK)


def _packed(make: Callable[[], Arguments]) -> Arguments:
    """x, expert_ids, weights, and the same matrices packed."""
    x, expert_ids, weights, up, down, _ = make()
    packed_up, packed_down = ([qgemm.pack(one, PACKED) for one in stack] for stack in (up, down))
    return x, expert_ids, weights, PackedExperts(packed_up, packed_down)


def _contenders(function: str, make: Callable[[], Arguments], w_bytes: float, setting: Setting) -> Iterable[Contender]:
    copies = [make() for _ in range(setting.timer.n_copies(w_bytes) if w_bytes else 1)]
    for implementation in catalog.runnable("moe", setting.device.type):
        if function in implementation.functions:
            is_peer = implementation.name == "reference"
            if is_peer and function in ("packed_experts", "adapted_experts"):
                continue  # it would take minutes
            calls = functools.partial(_calls, implementation, function, copies)
            yield Contender("torch" if is_peer else implementation.name, calls, is_peer, capture=not is_peer)


def _calls(implementation: catalog.Implementation, function: str, copies: list[Arguments]) -> list[Call]:
    run = _function(implementation, function, copies[0])
    return [functools.partial(run, *arguments) for arguments in copies]


def _function(implementation: catalog.Implementation, function: str, arguments: Arguments) -> Callable[..., Any]:
    """Raises NotRun where it does not take the arguments."""
    module = implementation.load()
    condition = catalog.condition_of(module)
    found = None if condition is None else condition(*arguments)
    if isinstance(found, str):
        raise NotRun(found)
    run: Callable[..., Any] = getattr(module, function)
    return run


def _error(
    shape: Shape, gating: Gating, n: int, setting: Setting, implementation: catalog.Implementation, form: str
) -> float:
    """Largest |got - reference| / (1 + |reference|)."""
    make = functools.partial(_products, shape, gating, n, setting)
    arguments = _in_codes(form, make) if form else make()
    arguments[1][0, 0] = -1
    x, expert_ids, weights, up, down, _ = arguments
    if form not in IN_E4M3:  # whose rows are rounded from x's own dtype
        x = x.double()
        up, down = (torch.stack([one[expert].double() for expert in range(shape.n_experts)]) for one in (up, down))
    exact = torch.empty_like(x, dtype=torch.float64)
    expected = reference.experts(x, expert_ids, weights, up, down, gating, out=exact)
    got = _function(implementation, "experts", arguments)(*arguments).double()
    return float(((got - expected).abs() / (1 + expected.abs())).max())


def _adapted(shape: Shape, gating: Gating, n: int, setting: Setting) -> Arguments:
    """Products of rows of which every fourth has no adapter, and the others take turns with some."""
    x, expert_ids, weights, up, down, _ = _products(shape, gating, n, setting)
    places = torch.arange(n, dtype=torch.int32, device=setting.device) % N_ADAPTERS
    places[::4] = -1
    pairs = ((up, (shape.inner, shape.inner)), (down, (shape.hidden,)))
    own_up, own_down = (_stack(shape.n_experts, sizes, matrices.shape[2], setting) for matrices, sizes in pairs)
    return x, expert_ids, weights, up, down, ExpertAdapters(own_up, own_down, places), gating


def _stack(n_experts: int, sizes: tuple[int, ...], k: int, setting: Setting) -> lora.Stack:
    """Of all adapters and experts, of the largest rank."""
    n = N_ADAPTERS * n_experts
    a = setting.randn(n, len(sizes) * RANK, k).mul_(k**-0.5)
    b = setting.randn(n, sum(sizes), RANK).mul_(RANK**-0.5)
    ranks = torch.full((n, len(sizes)), RANK, dtype=torch.int32, device=setting.device)
    return lora.Stack(a, b, ranks, torch.tensor(blocks_of(sizes), dtype=torch.int32, device=setting.device), sizes)


def _adapted_error(
    shape: Shape, gating: Gating, n: int, setting: Setting, implementation: catalog.Implementation
) -> float:
    """Largest |got - reference| / (1 + |reference|)."""
    arguments = _adapted(shape, gating, n, setting)
    x, *rest = arguments
    expected = reference.adapted_experts(x.double(), *rest)
    got = _function(implementation, "adapted_experts", arguments)(*arguments).double()
    return float(((got - expected).abs() / (1 + expected.abs())).max())


def _packed_error(shape: Shape, n: int, setting: Setting, implementation: catalog.Implementation) -> float:
    """Largest |got - reference| / (1 + |reference|), of the same packed matrices."""
    arguments = _packed(functools.partial(_products, shape, SWIGLU, n, setting))
    expected = reference.packed_experts(*arguments).double()
    got = _function(implementation, "packed_experts", arguments)(*arguments).double()
    return float(((got - expected).abs() / (1 + expected.abs())).max())
