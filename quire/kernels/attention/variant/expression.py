"""Expressions: what the hooks of a variant are made of, as small immutable trees.

Owns the node, its operators, the functions on nodes and the symbolic derivative. Does not own any lowering
(lowering.py) nor what hooks there are (definition.py). Invariant: equal trees have equal `text()`, which is their
identity on disk.
Operators follow Python's meaning except `/`, which is always a float division, and `&`, `|`, `~` on booleans.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any

Number = float | int | bool


@enum.unique
class Kind(enum.StrEnum):
    """What a node's value is. Numbers are float32 in kernels, float64 in a float64 reference; integers 32 bits."""

    FLOAT = "float"
    INT = "int"
    BOOL = "bool"


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
FUNCTIONS = ("exp", "log", "tanh", "sigmoid", "sqrt", "sin", "cos")
"""Of one float."""
HERE = "quire.kernels.attention.variant.expression"
INSTEAD = {
    **{name: f"{name}(x)" for name in FUNCTIONS},
    "where": "where(condition, a, b)",
    **dict.fromkeys(("minimum", "fmin", "min"), "minimum(a, b)"),
    **dict.fromkeys(("maximum", "fmax", "max"), "maximum(a, b)"),
    **dict.fromkeys(("abs", "absolute", "fabs"), "absolute(x)"),
    **dict.fromkeys(("clamp", "clip"), "minimum(maximum(x, low), high)"),
    "relu": "maximum(x, 0.0)",
    **dict.fromkeys(("expit", "sigmoid_"), "sigmoid(x)"),
    "exp2": "exp(0.6931471805599453 * x)",
    "log2": "1.4426950408889634 * log(x)",
    "rsqrt": "1.0 / sqrt(x)",
    **dict.fromkeys(("square", "pow", "power"), "exp(y * log(x)), or multiply"),
    **dict.fromkeys(("logical_and", "bitwise_and"), "a & b"),
    **dict.fromkeys(("logical_or", "bitwise_or"), "a | b"),
    **dict.fromkeys(("logical_not", "bitwise_not"), "~a"),
}
"""Function of torch or numpy → what to write in a hook."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """One node. Build nodes with operators and the functions of this module, not by hand."""

    op: str
    """A leaf: const, site (a coordinate of `Site`), scalar (a parameter), value (what the hook is given), partner (see
    `rotate_half`). load, an element of a tensor parameter. An operator or function of this module."""
    kind: Kind
    args: tuple[Expr, ...] = ()
    name: str = ""
    """Of a coordinate, parameter or tensor; the digits of a constant."""

    def text(self) -> str:
        """Prefix notation, for instance `(mul (scalar cap) (tanh (value x)))`; `#3` is the third node of `walk`."""
        uses: dict[int, int] = {}
        nodes = list(self.walk())
        for node in nodes:
            for arg in node.args:
                uses[id(arg)] = uses.get(id(arg), 0) + 1
        texts: dict[int, str] = {}
        shared: list[str] = []
        for number, node in enumerate(nodes):
            inner = " ".join([node.name] * bool(node.name) + [texts[id(arg)] for arg in node.args])
            texts[id(node)] = f"({node.op} {inner})"
            if node.args and uses.get(id(node), 0) > 1:
                shared.append(f"#{number} = {texts[id(node)]}")
                texts[id(node)] = f"#{number}"
        return "; ".join([*shared, texts[id(self)]])

    def walk(self) -> Iterator[Expr]:
        """Every node once, arguments before what uses them, this node last."""
        seen: set[int] = set()
        stack = [(self, False)]
        while stack:
            node, is_open = stack.pop()
            if is_open:
                yield node
            elif id(node) not in seen:
                seen.add(id(node))
                stack.append((node, True))
                stack += [(arg, False) for arg in reversed(node.args)]

    def __bool__(self) -> bool:
        raise TypeError("a symbolic value has no truth value yet: use where(condition, a, b), &, | and ~")

    def __float__(self) -> float:
        raise TypeError(f"a symbolic value is no number yet: use the functions of {HERE}")

    def __getitem__(self, index: object) -> Expr:
        raise TypeError(f"{self.text()} is one number and has no elements: make the parameter a tensor")

    def __pow__(self, exponent: object) -> Expr:
        raise TypeError("** is not offered: multiply, or use exp(y * log(x))")

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(f"a symbolic value has no {name}(): use {INSTEAD[name]} of {HERE}")
        raise AttributeError(f"a symbolic value has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        raise TypeError(_not_here("torch", getattr(func, "__name__", str(func))))

    def __array_ufunc__(self, ufunc: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(_not_here("numpy", ufunc.__name__))

    def __abs__(self) -> Expr:
        return absolute(self)

    __hash__ = object.__hash__

    def __add__(self, other: Operand) -> Expr:
        return _arithmetic("add", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return _arithmetic("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return _arithmetic("sub", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return _arithmetic("sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return _arithmetic("mul", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return _arithmetic("mul", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return Expr("div", Kind.FLOAT, (as_float(self), as_float(other)))

    def __rtruediv__(self, other: Operand) -> Expr:
        return Expr("div", Kind.FLOAT, (as_float(other), as_float(self)))

    def __floordiv__(self, other: Operand) -> Expr:
        return _arithmetic("floordiv", self, other)

    def __mod__(self, other: Operand) -> Expr:
        return _arithmetic("mod", self, other)

    def __neg__(self) -> Expr:
        return 0 - self if self.kind is Kind.INT else 0.0 - self

    def __lt__(self, other: Operand) -> Expr:
        return _comparison("lt", self, other)

    def __le__(self, other: Operand) -> Expr:
        return _comparison("le", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return _comparison("gt", self, other)

    def __ge__(self, other: Operand) -> Expr:
        return _comparison("ge", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return _comparison("eq", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return _comparison("ne", self, other)

    def __and__(self, other: Operand) -> Expr:
        return Expr("and", Kind.BOOL, (as_bool(self), as_bool(other)))

    def __rand__(self, other: Operand) -> Expr:
        return Expr("and", Kind.BOOL, (as_bool(other), as_bool(self)))

    def __or__(self, other: Operand) -> Expr:
        return Expr("or", Kind.BOOL, (as_bool(self), as_bool(other)))

    def __ror__(self, other: Operand) -> Expr:
        return Expr("or", Kind.BOOL, (as_bool(other), as_bool(self)))

    def __invert__(self) -> Expr:
        return Expr("not", Kind.BOOL, (as_bool(self),))


Operand = Expr | Number


def _not_here(library: str, name: str) -> str:
    """What a hook is told that calls another library's function."""
    if name in INSTEAD:
        return f"{library}.{name} cannot take a symbolic value: use {INSTEAD[name]} of {HERE}"
    return (
        f"{library}'s {name} cannot take a symbolic value: a hook has operators and the functions "
        f"{', '.join(FUNCTIONS)}, where, minimum, maximum, absolute of {HERE}; tensors are parameters, p.name[index]"
    )


def constant(value: Number) -> Expr:
    """A number written into the kernel. Use a parameter for what changes from call to call."""
    if isinstance(value, bool):
        return Expr("const", Kind.BOOL, name=str(value))
    if isinstance(value, int):
        return Expr("const", Kind.INT, name=str(value))
    if isinstance(value, float):
        return Expr("const", Kind.FLOAT, name=repr(value))
    raise TypeError(
        f"{value!r} cannot stand in a hook: use numbers, site, parameters (tensors with an index: p.name[...]) and the "
        f"functions of {HERE}"
    )


def wrap(value: Operand) -> Expr:
    """An expression or a number as an expression."""
    return value if isinstance(value, Expr) else constant(value)


def as_float(value: Operand) -> Expr:
    """Convert an integer or boolean; a float stays."""
    node = wrap(value)
    if node.kind is Kind.FLOAT:
        return node
    if node.op == "const" and node.kind is Kind.INT:
        return constant(float(node.name))
    return Expr("float", Kind.FLOAT, (node,))


def as_bool(value: Operand) -> Expr:
    """Check that an operand is boolean. Raises TypeError."""
    node = wrap(value)
    if node.kind is not Kind.BOOL:
        raise TypeError(f"{node.text()} is {node.kind}, but & | ~ and where's condition take booleans")
    return node


def minimum(a: Operand, b: Operand) -> Expr:
    """The smaller."""
    return _arithmetic("minimum", a, b)


def maximum(a: Operand, b: Operand) -> Expr:
    """The larger."""
    return _arithmetic("maximum", a, b)


def absolute(x: Operand) -> Expr:
    """|x|."""
    return maximum(x, -wrap(x))


def where(condition: Operand, a: Operand, b: Operand) -> Expr:
    """a where the condition holds, else b; both are computed."""
    a, b = _same_kind(a, b)
    return Expr("where", a.kind, (as_bool(condition), a, b))


def _function(name: str) -> Callable[[Operand], Expr]:
    def apply(x: Operand) -> Expr:
        return Expr(name, Kind.FLOAT, (as_float(x),))

    apply.__name__ = name
    apply.__doc__ = f"{name}(x) of a float."
    return apply


exp, log, tanh, sigmoid, sqrt, sin, cos = (_function(name) for name in FUNCTIONS)


def rotate_half(x: Expr) -> Expr:
    """Of a vector that a transform is given: -x[i + d/2] for i < d/2, else x[i - d/2] (rotary embedding, NeoX halves).

    Raises TypeError for anything but the transform's own x.
    """
    if x.op != "value":
        raise TypeError(f"rotate_half takes the x that the transform is given, not {x.text()}")
    return Expr("partner", Kind.FLOAT, name="half")


def load(name: str, index: Operand, kind: Kind) -> Expr:
    """An element of a tensor parameter, by flat index."""
    node = wrap(index)
    if node.kind is not Kind.INT:
        raise TypeError(f"parameter {name!r} is indexed with {node.text()}, which is {node.kind}: use an int")
    return Expr("load", kind, (node,), name)


def derivative(of: Expr) -> Expr:
    """d of / d value, the element that the hook was given. Raises TypeError where it does not exist."""
    if of.op == "value":
        return constant(1.0)
    if not any(node.op == "value" for node in of.walk()):
        return constant(0.0)
    if of.op == "where":
        return where(of.args[0], derivative(of.args[1]), derivative(of.args[2]))
    if of.op in ("minimum", "maximum"):
        a, b = of.args
        first = a <= b if of.op == "minimum" else a >= b
        return where(first, derivative(a), derivative(b))
    inner = [derivative(arg) for arg in of.args]
    a, b = (*of.args, *of.args)[:2]
    da, db = (*inner, *inner)[:2]
    rules: dict[str, Callable[[], Expr]] = {
        "add": lambda: _sum(da, db),
        "sub": lambda: _sum(da, _product(constant(-1.0), db)),
        "mul": lambda: _sum(_product(da, b), _product(a, db)),
        "div": lambda: _sum(_product(da, 1.0 / b), _product(constant(-1.0), _product(of / b, db))),
        "exp": lambda: _product(of, da),
        "log": lambda: _product(1.0 / a, da),
        "tanh": lambda: _product(1.0 - of * of, da),
        "sigmoid": lambda: _product(of * (1.0 - of), da),
        "sqrt": lambda: _product(0.5 / of, da),
        "sin": lambda: _product(cos(a), da),
        "cos": lambda: _product(-sin(a), da),
    }
    if of.op not in rules:
        raise TypeError(f"no derivative of {of.text()}: {of.op!r} of the logits is not differentiable")
    return rules[of.op]()


def _is(node: Expr, value: float) -> bool:
    return node.op == "const" and node.kind is Kind.FLOAT and float(node.name) == value


def _sum(a: Expr, b: Expr) -> Expr:
    return b if _is(a, 0.0) else a if _is(b, 0.0) else a + b


def _product(a: Expr, b: Expr) -> Expr:
    if _is(a, 0.0) or _is(b, 0.0):
        return constant(0.0)
    return b if _is(a, 1.0) else a if _is(b, 1.0) else a * b


def _same_kind(a: Operand, b: Operand) -> tuple[Expr, Expr]:
    a, b = wrap(a), wrap(b)
    if a.kind is b.kind:
        return a, b
    if Kind.BOOL in (a.kind, b.kind):
        raise TypeError(f"{a.text()} is {a.kind} and {b.text()} is {b.kind}: convert with where(condition, 1.0, 0.0)")
    return as_float(a), as_float(b)


def _arithmetic(op: str, a: Operand, b: Operand) -> Expr:
    """Integer if both sides are, else float. floordiv and mod: integers only, of values that are not negative."""
    a, b = _same_kind(a, b)
    if a.kind is Kind.BOOL:
        raise TypeError(f"{op} of booleans {a.text()}, {b.text()}: use & | ~ or where")
    if op in ("floordiv", "mod"):
        _check_divisor(op, a, b)
    return Expr(op, a.kind, (a, b))


def _comparison(op: str, a: Operand, b: object) -> Expr:
    if not isinstance(b, Expr | float | int):
        raise TypeError(f"{op} of {wrap(a).text()} with {b!r}")
    left, right = _same_kind(a, b)
    return Expr(op, Kind.BOOL, (left, right))


def _check_divisor(op: str, a: Expr, b: Expr) -> None:
    if a.kind is not Kind.INT:
        raise TypeError(f"{op} takes ints, not {a.text()} and {b.text()}")
    if b.op not in ("const", "scalar") or (b.op == "const" and int(b.name) < 1):
        raise TypeError(f"{op} by {b.text()}: divide by a positive constant or by an int parameter that is one")
