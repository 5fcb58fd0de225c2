"""From expressions to values (torch) and to source text (Triton, C++): one table a target, one walk for all.

Owns the meaning of every node on every target. Does not own kernels, nor where coordinates and parameters come from:
callers say so with `leaves`. Invariant: a shared node is computed once.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping

import torch

from quire.kernels.attention.variant.expression import Expr, Kind

Leaves = Mapping[tuple[str, str], str]
"""(op, name) of a leaf → source text: ("site", "q_pos"), ("scalar", "cap"), ("load", "slopes") for a tensor's address,
("value", "x"), ("partner", "half"); ("inverse", "cap") is optional: 1 / scalar, for divisions by it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A language."""

    templates: Mapping[str, str]
    """Op → text of the value from the texts of its arguments {0}, {1}, {2}; for "load", {0} is the address, {1} the
    index. "load int" goes before "load" where the value is an int, and so on."""
    assign: str
    """Text of a statement that gives the value {1} the name {0}."""
    constant: Callable[[Expr], str]


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_OPERATORS = {name: f"({{0}} {sign} {{1}})" for name, sign in (_INFIX | _COMPARE).items()}


def _c_constant(node: Expr) -> str:
    if node.kind is Kind.BOOL:
        return node.name.lower()
    if node.name in ("inf", "-inf", "nan"):
        return node.name.replace("inf", "INFINITY").replace("nan", "NAN")
    return f"{float(node.name)!r}f" if node.kind is Kind.FLOAT else node.name


def _c_function(name: str, n_args: int = 1) -> str:
    return f"quire_{name}({', '.join(f'{{{i}}}' for i in range(n_args))})"


def _triton_constant(node: Expr) -> str:
    return f'float("{node.name}")' if node.name in ("inf", "-inf", "nan") else node.name


TRITON = Target(
    _OPERATORS
    | {name: f"tl.{name}({{0}})" for name in ("exp", "log", "sigmoid", "sqrt", "sin", "cos")}
    | {
        "tanh": "(2.0 * tl.sigmoid(2.0 * {0}) - 1.0)",
        "floordiv": "({0} // {1})",
        "mod": "({0} % {1})",
        "minimum": "tl.minimum({0}, {1})",
        "maximum": "tl.maximum({0}, {1})",
        "and": "({0} & {1})",
        "or": "({0} | {1})",
        "not": "({0} == 0)",
        "where": "tl.where({0}, {1}, {2})",
        "float": "({0} * 1.0)",
        "load float": "tl.load({0} + {1})",
        "load int": "tl.load({0} + {1}).to(tl.int32)",
        "load bool": "(tl.load({0} + {1}) != 0)",
    },
    "{0} = {1}",
    _triton_constant,
)
"""Triton source."""

C = Target(
    _OPERATORS
    | {name: _c_function(name) for name in ("exp", "log", "tanh", "sigmoid", "sqrt", "sin", "cos", "float", "not")}
    | {name: _c_function(name, 2) for name in ("div", "minimum", "maximum", "and", "or", "load")}
    | {"floordiv": "({0} / {1})", "mod": "({0} % {1})", "where": _c_function("where", 3)},
    "const auto {0} = {1};",
    _c_constant,
)
"""C++ for CUDA (scalars) and for the CPU (scalars and vectors): functions `quire_*` are overloaded by each."""


def source(expr: Expr, target: Target, leaves: Leaves) -> tuple[list[str], str]:
    """Statements that compute `expr`, and the text of its value. Raises KeyError for a leaf that `leaves` lacks."""
    statements: list[str] = []
    texts: dict[int, str] = {}
    for node in expr.walk():
        if id(node) in texts:
            continue
        if node.op == "const":
            text = target.constant(node)
        elif (node.op, node.name) in leaves and not node.args:
            text = leaves[node.op, node.name]
        else:
            arguments = [texts[id(arg)] for arg in node.args]
            if node.op == "load":
                arguments.insert(0, leaves["load", node.name])
            template = target.templates.get(f"{node.op} {node.kind}") or target.templates[node.op]
            if node.op == "div" and node.args[1].op == "scalar" and ("inverse", node.args[1].name) in leaves:
                template, arguments[1] = target.templates["mul"], leaves["inverse", node.args[1].name]
            value = template.format(*arguments)
            text = f"e{len(statements)}"
            statements.append(target.assign.format(text, value))
        texts[id(node)] = text
    return statements, texts[id(expr)]


_TORCH: Mapping[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", *_COMPARE)},
    **{name: getattr(torch, name) for name in ("exp", "log", "tanh", "sigmoid", "sqrt", "sin", "cos")},
    "floordiv": operator.floordiv,
    "div": operator.truediv,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "where": torch.where,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
}


def evaluate(expr: Expr, leaves: Mapping[tuple[str, str], torch.Tensor], wide: torch.dtype) -> torch.Tensor:
    """The value in torch. leaves: as `Leaves`, tensors that broadcast against each other. wide: dtype of floats.

    Loads index the flattened tensor parameter. Raises KeyError for a leaf that `leaves` lacks.
    """
    device = next(iter(leaves.values())).device if leaves else torch.device("cpu")
    values: dict[int, torch.Tensor] = {}
    for node in expr.walk():
        if id(node) not in values:
            values[id(node)] = _value(node, [values[id(arg)] for arg in node.args], leaves, wide, device)
    return values[id(expr)]


def _value(
    node: Expr,
    args: list[torch.Tensor],
    leaves: Mapping[tuple[str, str], torch.Tensor],
    wide: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    dtype = {Kind.FLOAT: wide, Kind.INT: torch.int64, Kind.BOOL: torch.bool}[node.kind]
    if node.op == "const":
        plain = {"True": True, "False": False}.get(node.name, node.name)
        return torch.tensor(plain if isinstance(plain, bool) else float(plain), dtype=torch.float64).to(device, dtype)
    if node.op == "load":
        return leaves["load", node.name].flatten()[args[0]].to(dtype)
    if node.op == "float":
        return args[0].to(wide)
    if not args:
        return leaves[node.op, node.name].to(dtype)
    return _TORCH[node.op](*args)
