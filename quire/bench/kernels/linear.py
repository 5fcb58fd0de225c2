"""Cases of linear layers: the matrices of a Llama 8B and of a Qwen3 0.6B at a few rows. Torch's peer is the reference.

The fused cases have what stands around the product in a decoder: the norm before it, activation or residual after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from quire.bench.kernels.case import Case, Check, Contender, NotRun, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.timing import Call
from quire.kernels import catalog
from quire.kernels.gemm import hopper, reference
from quire.kernels.gemm.plan import MAX_NORM_ROWS

EPS = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class LinearCase:
    """A matrix [n, k] and what is fused with it."""

    n: int
    k: int
    norm: bool = False
    residual: bool = False
    silu_mul: bool = False

    @property
    def width(self) -> int:
        """Of the result."""
        return self.n // 2 if self.silu_mul else self.n

    @property
    def plain(self) -> LinearCase:
        """The product alone."""
        return LinearCase(self.n, self.k)


LAYERS = {
    "8b qkv": LinearCase(6144, 4096, norm=True),
    "8b o": LinearCase(4096, 4096, residual=True),
    "8b gate_up": LinearCase(28672, 4096, norm=True, silu_mul=True),
    "8b down": LinearCase(4096, 14336, residual=True),
    "8b head": LinearCase(128256, 4096),
    "0.6b qkv": LinearCase(4096, 1024, norm=True),
    "0.6b o": LinearCase(1024, 2048, residual=True),
    "0.6b gate_up": LinearCase(6144, 1024, norm=True, silu_mul=True),
    "0.6b down": LinearCase(1024, 3072, residual=True),
}
SIZES = {"cuda": (tuple(LAYERS), (1, 16, 64, 128, 256, 512, 2048)), "cpu": (("0.6b qkv", "0.6b down"), (1, 16))}
QUICK = ("8b gate_up, 16 rows", "0.6b qkv, 16 rows")
WITH_BIAS = (LinearCase(1000, 64), 16)
"""A layer and rows of a check that is no case's."""

Arguments = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is timed, and checked."""

    name: str
    layer: LinearCase
    m: int
    """Rows."""


def entries(device_type: str) -> Iterator[Entry]:
    """The products alone, and as fused as a decoder wants them (a norm only for few rows)."""
    names, rows = SIZES[device_type]
    for name in names:
        for fused in sorted({False, LAYERS[name] != LAYERS[name].plain}):
            layer = LAYERS[name] if fused else LAYERS[name].plain
            for m in rows:
                if m > MAX_NORM_ROWS:  # no kernel norms so many
                    layer = dataclasses.replace(layer, norm=False)
                yield Entry(f"{name}{' fused' if fused else ''}, {m} rows", layer, m)


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """One for each entry."""
    for one in entries(setting.device.type):
        layer, m = one.layer, one.m
        w_bytes, x_bytes = (setting.element_bytes * layer.k * height for height in (layer.n, m))
        work = Work(w_bytes + x_bytes, setting.element_bytes * m * layer.width, 2.0 * m * layer.n * layer.k)
        contenders = functools.partial(_contenders, layer, m, setting, w_bytes)
        yield Case(op, one.name, work, contenders, one.name, quick=one.name in QUICK)


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """Each case at its own size, as kernels are built for sizes and rows; and one with a bias, where nothing else
    follows."""
    listed = [*entries(setting.device.type), Entry("with a bias", *WITH_BIAS)]
    for implementation in catalog.runnable(op, setting.device.type):
        for one in listed if implementation.name != "reference" else ():
            has_bias = one is listed[-1]
            error = functools.partial(_error, one.layer, one.m, has_bias, setting, implementation)
            allowed = reference.TOLERANCE[setting.dtype]
            yield Check(op, one.name, implementation.name, error, allowed, quick=one.name in QUICK or has_bias)


def _arguments(layer: LinearCase, m: int, setting: Setting) -> Arguments:
    """x, w, bias, norm, residual, silu_mul, out."""
    w = setting.randn(layer.n, layer.k).mul_(layer.k**-0.5)
    norm = (setting.randn(layer.k), EPS) if layer.norm else None
    return setting.randn(m, layer.k), w, None, norm, _residual(layer, m, setting), layer.silu_mul, None


def _residual(layer: LinearCase, m: int, setting: Setting) -> torch.Tensor | None:
    return setting.randn(m, layer.width) if layer.residual else None


def _contenders(layer: LinearCase, m: int, setting: Setting, w_bytes: float) -> Iterable[Contender]:
    copies = [_arguments(layer, m, setting) for _ in range(setting.timer.n_copies(w_bytes))]
    for implementation in catalog.runnable("gemm", setting.device.type):
        is_peer = implementation.name == "reference"
        make = functools.partial(_calls, implementation, copies)
        yield Contender("torch" if is_peer else implementation.name, make, is_peer)


def _calls(implementation: catalog.Implementation, copies: list[Arguments]) -> list[Call]:
    function = _function(implementation, copies[0])
    return [functools.partial(function, *arguments) for arguments in copies]


def _function(implementation: catalog.Implementation, arguments: Arguments) -> Callable[..., torch.Tensor]:
    """`linear` of an implementation. Raises NotRun where the Hopper kernels need more than one launch."""
    found = implementation.load()
    refused = hopper.prepare(*arguments, apart=False) if found is hopper else None  # type: ignore[arg-type]
    if isinstance(refused, str):
        raise NotRun(refused)
    return found.linear  # type: ignore[no-any-return]


def _error(
    layer: LinearCase, m: int, has_bias: bool, setting: Setting, implementation: catalog.Implementation
) -> float:
    """Largest |got - reference| / (1 + |reference|)."""
    arguments = list(_arguments(layer, m, setting))
    if has_bias:
        arguments[2] = setting.randn(layer.n)
    expected = reference.linear(*(_widened(argument) for argument in arguments))  # type: ignore[arg-type]
    got = _function(implementation, tuple(arguments))(*arguments).double()
    return float(((got - expected).abs() / (1 + expected.abs())).max())


def _widened(argument: object) -> object:
    if isinstance(argument, tuple):
        return tuple(_widened(part) for part in argument)
    return argument.double() if isinstance(argument, torch.Tensor) else argument
