"""Cases of linear layers with weights of 8 and 4 bits on GPUs: matrices of a Llama 8B, against its product in bf16.

The limit is the time to read the codes and the scales, or to multiply: products of e4m3 count half, as the cores do
twice as many of them as of bf16, of which a run measures the rate. Invariant: the peers compute the same layer from the
matrix that the codes stand for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from quire.bench.kernels.case import Case, Check, Contender, NotRun, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.linear import LAYERS, LinearCase
from quire.kernels import catalog, gemm, mxfp4, w4a16, w8a8
from quire.kernels.w8a8 import reference

NAMES = ("8b qkv", "8b gate_up", "8b down")
ROWS = (1, 16, 64, 256, 2048)
LARGE = LinearCase(8192, 8192)
SMALL, SMALL_ROWS = (144, 512), 7
"""Of a check: a matrix for all kernels, and rows."""

Weights = tuple[Any, ...]
FORMS = {
    "w8a8": ("fp8 channels", "fp8 blocks", "int8"),
    "w4a16": ("g128", "g32 zeros"),
    "mxfp4": ("mxfp4", "nvfp4"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is timed, and checked."""

    name: str
    form: str
    layer: LinearCase
    m: int
    """Rows."""
    quick: bool = False


def entries(op: str, setting: Setting) -> Iterator[Entry]:
    """None on CPU, which has kernels of its own (qgemm)."""
    if setting.device.type != "cuda":
        return
    for form in FORMS[op]:
        listed = [(name, LAYERS[name].plain, m) for name in NAMES for m in ROWS]
        if op == "w8a8":
            listed.append(("8192", LARGE, 8192))
        for name, layer, m in listed:
            yield Entry(f"{name} {form}, {m} rows", form, layer, m, quick=m == 16 and name == NAMES[1])


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """One for each entry."""
    for one in entries(op, setting):
        layer, m = one.layer, one.m
        x_bytes, y_bytes = (setting.element_bytes * m * side for side in (layer.k, layer.n))
        flops, speed = 2.0 * m * layer.n * layer.k, 2.0 if op == "w8a8" else 1.0
        work = Work(_n_bytes(one.form, layer) + x_bytes, y_bytes, flops, speed)
        contenders = functools.partial(_contenders, op, one.form, layer, m, setting)
        yield Case(op, one.name, work, contenders, one.name, in_flops=layer is LARGE, quick=one.quick)


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """Each case at its own size, as kernels are built for sizes and rows; and each form at a small one, with a bias."""
    small = [Entry(form, form, LinearCase(*SMALL), SMALL_ROWS, quick=True) for form in FORMS[op]]
    allowed = catalog.entry(op, "reference").load().TOLERANCE[setting.dtype]
    for implementation in catalog.runnable(op, setting.device.type):
        for one in [*entries(op, setting), *small] if implementation.name != "reference" else ():
            if _function_name(one.form) in implementation.functions:
                error = functools.partial(_error, op, one, setting, implementation)
                yield Check(op, one.name, implementation.name, error, allowed, one.quick)


def _function_name(form: str) -> str:
    return {"fp8": "linear_fp8", "int8": "linear_int8"}.get(form.split()[0], "linear")


def _n_bytes(form: str, layer: LinearCase) -> float:
    scales = {"g128": 2 / 128, "g32 zeros": 4 / 32, "mxfp4": 1 / 32, "nvfp4": 1 / 16}.get(form, 0.0)
    return layer.n * layer.k * ((0.5 if scales else 1.0) + scales)


def packed(form: str, layer: LinearCase, setting: Setting) -> Weights:
    """What stands between x and the bias in the arguments of an implementation."""
    n, k, device = layer.n, layer.k, setting.device
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    if form == "int8":
        return codes, torch.full((n,), k**-0.5 / 70, device=device), None
    if form.startswith("fp8"):
        shape = (n,) if form == "fp8 channels" else (-(-n // w8a8.BLOCK), -(-k // w8a8.BLOCK))
        return codes.half().to(torch.float8_e4m3fn), torch.full(shape, k**-0.5 / 70, device=device), None
    nibbles = codes.view(torch.uint8) & 15
    if form.endswith("fp4"):
        blocks, is_nv = nibbles[:, ::2] | nibbles[:, 1::2] << 4, form == "nvfp4"
        n_blocks = -(-k // (mxfp4.NV_BLOCK if is_nv else mxfp4.BLOCK))
        factors = torch.full((n,), 2.0**-7, device=device) if is_nv else None
        scales = torch.full((n, n_blocks), 56 if is_nv else 120, dtype=torch.uint8, device=device)  # 1, 2^-7
        return (mxfp4.pack(blocks, scales, factors),)
    group = 32 if form.startswith("g32") else 128
    scales = torch.full((n, -(-k // group)), k**-0.5 / 5, dtype=setting.dtype, device=device)
    zeros = torch.full(scales.shape, 7, dtype=torch.uint8, device=device) if form.endswith("zeros") else None
    return (w4a16.pack(nibbles, scales, zeros, group=group),)


def _contenders(op: str, form: str, layer: LinearCase, m: int, setting: Setting) -> Iterable[Contender]:
    copies = [packed(form, layer, setting) for _ in range(setting.timer.n_copies(_n_bytes(form, layer)))]
    x, rest = setting.randn(m, layer.k), (None, None, None, False, None)
    for implementation in catalog.runnable(op, setting.device.type):
        if implementation.name != "reference" and _function_name(form) in implementation.functions:
            function = getattr(implementation.load(), _function_name(form))
            calls = [functools.partial(function, x, *weight, *rest) for weight in copies]
            if _takes(implementation, x, *copies[0], *rest):
                yield Contender(implementation.name, functools.partial(list, calls))
    if form.startswith("fp8"):
        yield from _of_codes(form, copies, x)
    wide = [setting.randn(layer.n, layer.k) for _ in range(setting.timer.n_copies(2.0 * layer.n * layer.k))]
    peers: dict[str, Callable[..., torch.Tensor]] = {"bf16 gemm": gemm.linear, "bf16 torch": F.linear}
    for name, peer in peers.items():
        peer_calls = [functools.partial(peer, x, matrix) for matrix in wide]
        yield Contender(name, functools.partial(list, peer_calls), is_peer=True)


def _of_codes(form: str, copies: list[Weights], x: torch.Tensor) -> Iterator[Contender]:
    """The product alone, of x that is rounded before: our own, and torch's."""
    hopper = catalog.entry("w8a8", "hopper").load()  # with Triton, which machines without a GPU need not have
    dtype, arguments = x.dtype, (x, *copies[0], None, None, None, False, None)
    launch = hopper.prepare(*arguments)
    if isinstance(launch, hopper.Launch) and not launch.rounds:
        rounded = hopper.round_rows(x, form == "fp8 blocks", None, room=launch.tokens)
        calls = [functools.partial(launch.multiply, rounded, weight[0], weight[1], dtype) for weight in copies]
        yield Contender("hopper, x in codes", functools.partial(list, calls))
    yield Contender("torch, x in codes", functools.partial(_torch_calls, form, copies, x), is_peer=True)


def _torch_calls(form: str, copies: list[Weights], x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    """`torch._scaled_mm` with scales of rows and channels, or of 1 x 128 and 128 x 128 numbers (cuBLAS 12.9)."""
    codes, scales = reference.quantise(x, torch.float8_e4m3fn, w8a8.BLOCK if form == "fp8 blocks" else x.shape[1])
    calls: list[Callable[[], torch.Tensor]] = []
    for weight, scale, _ in copies:
        if form == "fp8 blocks":
            of_x, of_w = scales.t().contiguous().t(), F.pad(scale, (0, -scale.shape[1] % 4)).t()
        else:
            of_x, of_w = scales, scale[None]
        calls.append(
            functools.partial(torch._scaled_mm, codes, weight.t(), scale_a=of_x, scale_b=of_w, out_dtype=x.dtype)
        )
    try:
        calls[0]()
    except (RuntimeError, ValueError) as error:
        raise NotRun(str(error).splitlines()[0]) from error
    return calls


def _takes(implementation: catalog.Implementation, *arguments: object) -> bool:
    condition = catalog.condition_of(implementation.load())
    return condition is None or not isinstance(condition(*arguments), str)


def _error(op: str, one: Entry, setting: Setting, implementation: catalog.Implementation) -> float:
    """Largest |got - reference| / (1 + |reference|), in units of the results' deviation where that is more than 1."""
    weight, x = packed(one.form, one.layer, setting), setting.randn(one.m, one.layer.k)
    bias = setting.randn(one.layer.n) if one.m == SMALL_ROWS else None
    arguments = (x, *weight, bias, None, None, False, None)
    own, oracle = (
        getattr(each.load(), _function_name(one.form)) for each in (implementation, catalog.entry(op, "reference"))
    )
    condition = catalog.condition_of(implementation.load())
    refused = None if condition is None else condition(*arguments)
    if isinstance(refused, str):
        raise NotRun(refused)
    expected = oracle(*arguments).double()
    found = (own(*arguments).double() - expected).abs() / (1 + expected.abs())
    return float(found.max()) / max(1.0, float(expected.std()))
