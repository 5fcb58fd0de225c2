"""Cases of mixtures of experts: the choice, and the products with even routing, of models that have many.

Torch's reference reads the choice on the host. Bytes are those of the experts that are chosen.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from quire.bench.kernels.case import Case, Contender, NotRun, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.timing import Call
from quire.config.experts import Gating, RoutingSpec
from quire.kernels import catalog, lora, nibbles, qgemm
from quire.kernels.lora.weight import blocks_of
from quire.kernels.moe import SWIGLU, CodedMatrices, Codes, ExpertAdapters, PackedExperts
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
FP4_DEVIATION = 2.9
"""Of the sixteen numbers of e2m1."""
PACKED = "int4"
"""How matrices are rounded for the CPU, beside those that are packed as they are."""


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
Arguments = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is timed; with fewer experts and rows it is checked."""

    name: str
    function: str
    shape: Shape
    n: int
    """Rows."""
    make: Callable[[Shape, int, Setting], Arguments]
    work: Work
    w_bytes: float = 0.0
    """Of matrices; copies of them leave the cache."""
    form: str = ""
    """Of `CODES`, `PACKED`, or that of floating numbers."""
    in_flops: bool = False
    quick: bool = False


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """The choice of some tokens, and the products of few tokens and many."""
    for one in entries(setting):
        make = functools.partial(one.make, one.shape, one.n, setting)
        contenders = functools.partial(_contenders, one.function, make, one.w_bytes, setting)
        yield Case(op, one.name, one.work, contenders, one.name, in_flops=one.in_flops, quick=one.quick)


def entries(setting: Setting) -> Iterator[Entry]:
    """Of the setting's device."""
    names, rows = SIZES[setting.device.type]
    for name in names:
        shape = SHAPES[name]
        yield from _choices(name, shape)
        for n in WITH_SHARED if name in SHARED and setting.device.type == "cuda" else ():
            w_bytes = _w_bytes(shape, n, setting) + float(setting.element_bytes * shape.numbers * SHARED[name])
            make = functools.partial(_with_shared, SHARED[name])
            of_both = f"{name} and what all share, {n} rows"
            yield Entry(of_both, "experts_with_shared", shape, n, make, Work(w_bytes), w_bytes)
        for n in rows:
            yield from _of_rows(name, shape, n, setting)


def _choices(name: str, shape: Shape) -> Iterator[Entry]:
    moved = Work(4.0 * CHOICES * shape.n_experts, 8.0 * CHOICES * shape.n_chosen)
    yield Entry(f"{name}, choice of {CHOICES} rows", "route", shape, CHOICES, _choice, moved)
    for n in ROUTED:
        moved = Work(4.0 * shape.n_experts * shape.hidden + 2.0 * n * shape.hidden, 8.0 * n * shape.n_chosen)
        yield Entry(f"{name}, router and choice of {n} rows", "choose", shape, n, _routed, moved)


def _of_rows(name: str, shape: Shape, n: int, setting: Setting) -> Iterator[Entry]:
    """The products of n rows, by matrices as they are and in codes."""
    w_bytes, x_bytes = _w_bytes(shape, n, setting), float(setting.element_bytes * n * shape.hidden)
    work = Work(w_bytes + x_bytes, x_bytes, 2.0 * n * shape.n_chosen * shape.numbers)
    plain, is_long = f"{name}, {n} rows", n > 1000
    if setting.device.type == "cpu":
        make, kind = _packed_floats, "packed_experts"
        yield Entry(plain, kind, shape, n, make, work, w_bytes, in_flops=is_long, quick=plain in QUICK)
        n_bytes = w_bytes / setting.element_bytes * qgemm.SCHEMES[PACKED].bytes_per_weight
        work = Work(n_bytes + x_bytes, x_bytes, work.flops)
        yield Entry(f"{name} {PACKED}, {n} rows", kind, shape, n, _packed, work, form=PACKED)
        return
    make = functools.partial(products, gating=SWIGLU)
    yield Entry(plain, "experts", shape, n, make, work, w_bytes, in_flops=is_long, quick=plain in QUICK)
    for form, n_bits in CODES.items():
        speed = 2.0 if form in IN_E4M3 else 1.0
        moved = Work(w_bytes * n_bits / 8 / setting.element_bytes + x_bytes, x_bytes, work.flops, speed)
        coded = functools.partial(_in_codes, form)
        yield Entry(f"{name} {form}, {n} rows", "experts", shape, n, coded, moved, w_bytes, form, is_long)
    if n in ADAPTED:
        of_adapters = f"{name}, {N_ADAPTERS} adapters, {n} rows"
        yield Entry(of_adapters, "adapted_experts", shape, n, _adapted, work, w_bytes)


def _w_bytes(shape: Shape, n: int, setting: Setting) -> float:
    """Of the matrices of those that are chosen."""
    return float(setting.element_bytes * shape.numbers * min(shape.n_experts, n * shape.n_chosen))


def _choice(shape: Shape, n: int, setting: Setting) -> Arguments:
    """logits, routing, correction."""
    logits = setting.randn(n, shape.n_experts, dtype=torch.float32)
    return logits, RoutingSpec(n_chosen=shape.n_chosen, renormalise=True), None


def _routed(shape: Shape, n: int, setting: Setting) -> Arguments:
    """x, router, bias, routing, correction, load."""
    router = setting.randn(shape.n_experts, shape.hidden, dtype=torch.float32).mul_(shape.hidden**-0.5)
    return setting.randn(n, shape.hidden), router, None, RoutingSpec(n_chosen=shape.n_chosen), None, None


def products(shape: Shape, n: int, setting: Setting, gating: Gating) -> Arguments:
    """x, expert_ids, weights, up, down, gating; experts are taken in turn, so that they are chosen evenly."""
    taken = torch.arange(n * shape.n_chosen, dtype=torch.int32) % shape.n_experts
    weights = torch.full((n, shape.n_chosen), 1 / shape.n_chosen, device=setting.device)
    up = setting.randn(shape.n_experts, 2 * shape.inner, shape.hidden).mul_(shape.hidden**-0.5)
    down = setting.randn(shape.n_experts, shape.hidden, shape.inner).mul_(shape.inner**-0.5)
    expert_ids = taken.view(n, shape.n_chosen).to(setting.device)
    return setting.randn(n, shape.hidden), expert_ids, weights, up, down, gating


def _with_shared(n_shared: int, shape: Shape, n: int, setting: Setting) -> Arguments:
    """x, expert_ids, weights, up, down, shared_up, shared_down, residual."""
    x, *others, _ = products(shape, n, setting, SWIGLU)
    size = n_shared * shape.inner
    shared_up = setting.randn(2 * size, shape.hidden).mul_(shape.hidden**-0.5)
    return x, *others, shared_up, setting.randn(shape.hidden, size).mul_(size**-0.5), torch.zeros_like(x)


def _in_codes(form: str, shape: Shape, n: int, setting: Setting) -> Arguments:
    """The same as of `products`, with random codes for the matrices."""
    x, expert_ids, weights, up, down, gating = products(shape, n, setting, SWIGLU)
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
        exponent = 127 + round(math.log2(size / FP4_DEVIATION))
        exponents = torch.full((n_experts, n, -(-k // 32)), exponent, device=device, dtype=torch.uint8)
        return CodedMatrices(Codes.FP4, k, words, exponents, 32)
    scales = torch.full((n_experts, n, -(-k // BLOCK)), size / 5, device=device, dtype=like.dtype)
    return CodedMatrices(Codes.INT4, k, words, scales, BLOCK)


def _packed(shape: Shape, n: int, setting: Setting) -> Arguments:
    """x, expert_ids, weights, and the same matrices packed."""
    x, expert_ids, weights, up, down, _ = products(shape, n, setting, SWIGLU)
    packed_up, packed_down = ([qgemm.pack(one, PACKED) for one in stack] for stack in (up, down))
    return x, expert_ids, weights, PackedExperts(packed_up, packed_down)


def _packed_floats(shape: Shape, n: int, setting: Setting) -> Arguments:
    """x, expert_ids, weights, and the same matrices packed as they are: a CPU's experts without rounding."""
    x, expert_ids, weights, up, down, _ = products(shape, n, setting, SWIGLU)
    packed_up, packed_down = ([qgemm.pack_floats(one) for one in stack] for stack in (up, down))
    return x, expert_ids, weights, PackedExperts(packed_up, packed_down)


def unpacked(x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts) -> Arguments:
    """The arguments of `experts`, from those of `packed_experts`."""
    stacks = [torch.stack([one.dequantized().to(x.dtype) for one in each]) for each in (packed.up, packed.down)]
    return x, expert_ids, weights, *stacks, SWIGLU


def _contenders(function: str, make: Callable[[], Arguments], w_bytes: float, setting: Setting) -> Iterable[Contender]:
    copies = [make() for _ in range(setting.timer.n_copies(w_bytes) if w_bytes else 1)]
    for implementation in catalog.runnable("moe", setting.device.type):
        if function in implementation.functions:
            is_peer = implementation.name == "reference"
            calls = functools.partial(_calls, implementation, function, copies)
            if is_peer and function == "packed_experts" and w_bytes:
                calls = functools.partial(_calls_unpacked, implementation, copies)
            elif is_peer and function in ("packed_experts", "adapted_experts"):
                continue  # it would take minutes
            yield Contender("torch" if is_peer else implementation.name, calls, is_peer, capture=not is_peer)


def _calls(implementation: catalog.Implementation, function: str, copies: list[Arguments]) -> list[Call]:
    run = function_of(implementation, function, copies[0])
    return [functools.partial(run, *arguments) for arguments in copies]


def _calls_unpacked(implementation: catalog.Implementation, copies: list[Arguments]) -> list[Call]:
    return _calls(implementation, "experts", [unpacked(*arguments) for arguments in copies])


def function_of(implementation: catalog.Implementation, function: str, arguments: Arguments) -> Callable[..., Any]:
    """Raises NotRun where it does not take the arguments."""
    module = implementation.load()
    condition = catalog.condition_of(module)
    found = None if condition is None else condition(*arguments)
    if isinstance(found, str):
        raise NotRun(found)
    run: Callable[..., Any] = getattr(module, function)
    return run


def _adapted(shape: Shape, n: int, setting: Setting) -> Arguments:
    """Products of rows of which every fourth has no adapter, and the others take turns with some."""
    x, expert_ids, weights, up, down, _ = products(shape, n, setting, SWIGLU)
    places = torch.arange(n, dtype=torch.int32, device=setting.device) % N_ADAPTERS
    places[::4] = -1
    pairs = ((up, (shape.inner, shape.inner)), (down, (shape.hidden,)))
    own_up, own_down = (_stack(shape.n_experts, sizes, matrices.shape[2], setting) for matrices, sizes in pairs)
    return x, expert_ids, weights, up, down, ExpertAdapters(own_up, own_down, places), SWIGLU


def _stack(n_experts: int, sizes: tuple[int, ...], k: int, setting: Setting) -> lora.Stack:
    """Of all adapters and experts, of the largest rank."""
    n = N_ADAPTERS * n_experts
    a = setting.randn(n, len(sizes) * RANK, k).mul_(k**-0.5)
    b = setting.randn(n, sum(sizes), RANK).mul_(RANK**-0.5)
    ranks = torch.full((n, len(sizes)), RANK, dtype=torch.int32, device=setting.device)
    return lora.Stack(a, b, ranks, torch.tensor(blocks_of(sizes), dtype=torch.int32, device=setting.device), sizes)
