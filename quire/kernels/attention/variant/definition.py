"""A variant: what one attention computes, written once in Python and lowered to every device.

    def capped(logits, site, p):
        return p.cap * tanh(logits / p.cap)

    variant = Variant(scale=128**-0.5, logits_transform=capped, params={"cap": 30.0})

Owns the hooks, their arguments and their tracing. The hooks' names are FlashInfer's (Ye et al. 2025, section 3.2).
Invariant: `program` depends on hooks and on the kinds of parameters, never on their values.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import torch

from quire.kernels.attention.variant import expression
from quire.kernels.attention.variant.expression import Expr, Kind, Operand

MAX_PARAMS = 8
"""Scalars, and tensors, of one variant (QUIRE_MAX_PARAMS in csrc)."""

LARGEST_INT = 1 << 24
"""Integer scalars travel as float32."""

TENSOR_KINDS = {
    torch.float32: Kind.FLOAT,
    torch.int32: Kind.INT,
    torch.uint8: Kind.INT,
    torch.bool: Kind.BOOL,
}
"""dtype of a tensor parameter → kind of its elements in a hook."""

COORDINATES = {
    "query_transform": ("q_row", "q_pos", "q_head", "kv_head", "dim"),
    "key_transform": ("k_pos", "kv_head", "dim"),
    "value_transform": ("k_pos", "kv_head", "dim"),
    "logits_transform": ("q_row", "q_pos", "k_pos", "q_head", "kv_head"),
    "logits_mask": ("q_row", "q_pos", "k_pos", "q_head", "kv_head"),
    "output_transform": ("q_row", "q_head", "kv_head", "dim", "lse"),
}
"""Hook → what `site` offers to it."""


VECTOR_HOOKS = ("query_transform", "key_transform", "value_transform")
"""Hooks that may use the partner of their element (`expression.rotate_half`)."""


class Site:
    """Where a hook is: integers, and `lse` (float, natural logarithm of the sum of weights, -inf if nothing is seen).

    q_row: row in the flat batch. q_pos, k_pos: positions in the sequence. q_head, kv_head: heads. dim: element of the
    head. A hook sees those of `COORDINATES`; others raise AttributeError.
    """

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __getattr__(self, name: str) -> Expr:
        offered = COORDINATES[self._hook]
        if name not in offered:
            raise AttributeError(f"{self._hook} has no site.{name}: it offers {', '.join(offered)}")
        return Expr("site", Kind.FLOAT if name == "lse" else Kind.INT, name=name)


class TensorParam:
    """A tensor parameter inside a hook: `p.slopes[site.q_head]`, flat index."""

    def __init__(self, name: str, kind: Kind) -> None:
        self._name = name
        self._kind = kind

    def __repr__(self) -> str:
        return f"p.{self._name} (a tensor)"

    def __getitem__(self, index: Operand) -> Expr:
        return expression.load(self._name, index, self._kind)


if TYPE_CHECKING:

    class Parameter(Expr, TensorParam):
        """What a checker may suppose of `p.name`: a scalar computes, a tensor is indexed; its value decides."""


class Params:
    """The parameters inside a hook: scalars are expressions, tensors are indexed."""

    def __init__(self, values: Mapping[str, float | torch.Tensor]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Parameter:
        if name not in self._values:
            raise AttributeError(f"the variant has no parameter {name!r}: it has {', '.join(self._values) or 'none'}")
        value = self._values[name]
        if isinstance(value, torch.Tensor):
            return cast("Parameter", TensorParam(name, TENSOR_KINDS[value.dtype]))
        return cast("Parameter", Expr("scalar", Kind.INT if isinstance(value, int) else Kind.FLOAT, name=name))


_PROGRAMS: dict[str, Program] = {}
"""Text → the one program of that text."""

ElementHook = Callable[[Expr, Site, Params], Operand]
MaskHook = Callable[[Site, Params], Operand]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The traced hooks: all that decides which kernel is compiled, apart from shapes and dtypes.

    Equal programs are one object, so a kernel may be kept by its program's identity.
    """

    causal: bool
    windowed: bool
    softmax: bool
    hooks: Mapping[str, Expr]
    """Hook → expression; hooks that a variant does not have are absent."""
    scalars: Mapping[str, Kind]
    """Scalar parameters, in the order of their slots in a kernel's arguments, and whether they are int or float."""
    tensors: Mapping[str, torch.dtype]
    """Tensor parameters, likewise, and their dtypes."""

    def text(self) -> str:
        """Canonical description."""
        lines = [f"causal={self.causal} windowed={self.windowed} softmax={self.softmax}"]
        lines += [f"{hook}: {expr.text()}" for hook, expr in sorted(self.hooks.items())]
        for what, kinds in (("scalars", self.scalars), ("tensors", self.tensors)):
            lines.append(f"{what}: {' '.join(f'{name}:{kind}' for name, kind in kinds.items())}")
        return "\n".join(lines)

    def digest(self) -> str:
        """16 hexadecimal digits of the text."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def reads(self, coordinate: str) -> bool:
        """True if any hook uses site.<coordinate>."""
        return any(
            node.op == "site" and node.name == coordinate for expr in self.hooks.values() for node in expr.walk()
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """softmax(logits_transform(scale * q k), hidden keys left out) v, and the transforms around it."""

    scale: float
    """Factor on q·k, usually head_dim ** -0.5."""
    window: int = 0
    """w > 0: the token at position i sees positions i-w+1 .. i, and the first `n_first`; 0: no such limit."""
    n_first: int = 0
    """Leading positions that stay visible beside the window (StreamingLLM's attention sinks)."""
    causal: bool = True
    """The token at position i sees no position above i."""
    softmax: bool = True
    """False: what logits_transform returns is the weight itself (sigmoid attention), hidden keys weigh 0."""
    query_transform: ElementHook | None = None
    key_transform: ElementHook | None = None
    value_transform: ElementHook | None = None
    logits_transform: ElementHook | None = None
    """(scale * q k, site, p) → the logit that enters the softmax."""
    logits_mask: MaskHook | None = None
    """(site, p) → True where the key is visible, in addition to causal and window."""
    output_transform: ElementHook | None = None
    """(one element of the normalised output, site, p) → what is stored."""
    params: Mapping[str, float | torch.Tensor] = dataclasses.field(default_factory=dict)
    """Scalars (int or float), and contiguous tensors of a dtype in `TENSOR_KINDS` on the device of q."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", types.MappingProxyType(dict(self.params)))  # read once, so never changed
        if not isinstance(self.scale, float | int) or not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale!r}: give a finite number, usually head_dim ** -0.5")
        for hook in COORDINATES:
            _check_hook(hook, getattr(self, hook))
        if self.window < 0 or self.n_first < 0:
            raise ValueError(f"window {self.window} and n_first {self.n_first} must not be negative")
        if self.n_first and not self.window:
            raise ValueError(f"n_first {self.n_first} has no meaning without a window: set window > 0")
        for names, what in ((self.scalars, "scalar"), (self.tensors, "tensor")):
            if len(names) > MAX_PARAMS:
                raise ValueError(f"{len(names)} {what} parameters: a variant has at most {MAX_PARAMS}; join some")
        for name, value in self.tensors.items():
            if value.dtype not in TENSOR_KINDS or not value.is_contiguous():
                allowed = ", ".join(str(dtype) for dtype in TENSOR_KINDS)
                raise ValueError(f"parameter {name!r} is {value.dtype}: use a contiguous tensor of {allowed}")
            if value.numel() >= 1 << 31:
                raise ValueError(f"parameter {name!r} has {value.numel()} elements: indices have 32 bits")
        for name, number in self.scalars.items():
            if not isinstance(number, float | int):
                raise ValueError(f"parameter {name!r} is {number!r}: give a number or a torch tensor")
            if isinstance(number, int) and abs(number) > LARGEST_INT:
                problem = f"integers reach to {LARGEST_INT}; use an int32 tensor"
                raise ValueError(f"parameter {name!r} is {number}: {problem}")

    @functools.cached_property
    def scalars(self) -> dict[str, float]:
        """Scalar parameters by name."""
        return {name: value for name, value in self.params.items() if not isinstance(value, torch.Tensor)}

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensor parameters by name."""
        return {name: value for name, value in self.params.items() if isinstance(value, torch.Tensor)}

    @functools.cached_property
    def program(self) -> Program:
        """The hooks as expressions. Raises TypeError or AttributeError where a hook does what cannot be lowered."""
        hooks = {}
        for hook in COORDINATES:
            function = getattr(self, hook)
            if function is not None:
                hooks[hook] = _trace(hook, function, Params(self.params))
        _check_divisors(self, hooks)
        scalars = {name: Kind.INT if isinstance(value, int) else Kind.FLOAT for name, value in self.scalars.items()}
        tensors = {name: value.dtype for name, value in self.tensors.items()}
        program = Program(self.causal, self.window > 0, self.softmax, hooks, scalars, tensors)
        if not self.softmax and program.reads("lse"):
            raise TypeError("output_transform reads site.lse, which attention without softmax does not have")
        return _PROGRAMS.setdefault(program.text(), program)

    @property
    def built_in(self) -> bool:
        """No hooks: plain causal, windowed or full attention."""
        return not self.program.hooks and self.softmax


def _check_hook(hook: str, function: Callable[..., object] | None) -> None:
    """Raises TypeError for what cannot be called with the arguments of its hook."""
    given = ("site", "p") if hook == "logits_mask" else ("x", "site", "p")
    if function is None:
        return
    try:
        inspect.signature(function).bind(*given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{hook} must be a function of ({', '.join(given)}), not {function!r}: {error}") from None


def _check_divisors(variant: Variant, hooks: Mapping[str, Expr]) -> None:
    """Raises ValueError for divisors that are not positive."""
    nodes = [node for expr in hooks.values() for node in expr.walk()]
    for divisor in (node.args[1] for node in nodes if node.op in ("floordiv", "mod")):
        if divisor.op == "scalar" and variant.scalars[divisor.name] < 1:
            raise ValueError(f"parameter {divisor.name!r} is {variant.scalars[divisor.name]}, but a hook divides by it")


def _trace(hook: str, function: Callable[..., Operand], params: Params) -> Expr:
    given = () if hook == "logits_mask" else (Expr("value", Kind.FLOAT, name="x"),)
    result = function(*given, Site(hook), params)
    if result is None:
        raise TypeError(f"{hook} returned None: it must return an expression")
    if hook == "logits_mask":
        return expression.as_bool(result)
    traced = expression.as_float(result)
    if hook not in VECTOR_HOOKS and any(node.op == "partner" for node in traced.walk()):
        raise TypeError(f"{hook} uses rotate_half, which is for {', '.join(VECTOR_HOOKS)}")
    return traced
