"""From a variant to what its kernels need: hook functions in a generated module, and the values of parameters.

Hooks travel into the kernels as constexpr arguments (a @triton.jit function, or None), parameters as one tuple: scalars
as floats, so that no value is compiled in, then tensors. Owns the text of the functions, not the meaning of nodes
(lowering.py). Invariant: the module's name holds a digest of its text, so two variants never share a compiled kernel.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from quire.kernels import jit
from quire.kernels.attention.variant import COORDINATES, Program, Variant, lowering
from quire.kernels.attention.variant.expression import Expr, Kind

NAMES = {
    "query_transform": "QUERY",
    "key_transform": "KEY",
    "value_transform": "VALUE",
    "logits_transform": "LOGITS",
    "logits_mask": "MASK",
    "output_transform": "OUTPUT",
}
"""Hook → the kernels' argument."""

WITH_PARTNER = ("query_transform", "key_transform", "value_transform")
"""Hooks whose functions take the partner element of rotate_half after x; bit i of PARTNERS: hook i reads it."""

_HEADER = "import triton\nimport triton.language as tl\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Hooks:
    """One variant's part of a launch."""

    functions: dict[str, Any]
    """The arguments of `NAMES`, and PARTNERS."""
    params: tuple[float | torch.Tensor, ...]

    def merging(self) -> dict[str, Any]:
        """The merge kernel's part."""
        return {"OUTPUT": self.functions["OUTPUT"]}


_KNOWN: weakref.WeakKeyDictionary[Variant, Hooks] = weakref.WeakKeyDictionary()


def of(variant: Variant) -> Hooks:
    """The hooks of a variant; made once."""
    if variant not in _KNOWN:
        program = variant.program
        module = jit.generated_module(f"attention_{program.digest()}", source(program)) if program.hooks else None
        functions = {name: getattr(module, hook, None) for hook, name in NAMES.items()}
        partners = sum(1 << i for i, hook in enumerate(WITH_PARTNER) if reads_partner(program.hooks.get(hook)))
        scalars = [float(value) for value in variant.scalars.values()]
        params: tuple[float | torch.Tensor, ...] = (*scalars, *variant.tensors.values())
        params = params or (0.0,)  # an empty tuple is no kernel argument everywhere
        _KNOWN[variant] = Hooks(functions | {"PARTNERS": partners}, params)
    return _KNOWN[variant]


def reads_partner(expr: Expr | None) -> bool:
    """True for an expression with rotate_half."""
    return expr is not None and any(node.op == "partner" for node in expr.walk())


def source(program: Program) -> str:
    """The text of a module with one @triton.jit function for each hook.."""
    return "\n\n".join([_HEADER, *(_function(hook, expr, program) for hook, expr in program.hooks.items())])


def _function(hook: str, expr: Expr, program: Program) -> str:
    given = [] if hook == "logits_mask" else ["x", "partner"] if hook in WITH_PARTNER else ["x"]
    statements, value = lowering.source(expr, lowering.TRITON, _leaves(hook, program))
    if given and not any(node.op == "value" for node in expr.walk()):
        statements.append("shaped = x * 0.0")
        value = f"tl.where(shaped == shaped, {value}, {value})"  # of x's shape, whatever the value's is
    body = "\n".join(f"    {line}" for line in [*statements, f"return {value}"])
    return f"@triton.jit\ndef {hook}({', '.join([*given, *COORDINATES[hook], 'params'])}):\n{body}\n"


def _leaves(hook: str, program: Program) -> dict[tuple[str, str], str]:
    leaves = {("site", name): name for name in COORDINATES[hook]}
    leaves |= {("value", "x"): "x", ("partner", "half"): "partner"}
    for slot, (name, kind) in enumerate(program.scalars.items()):
        leaves["scalar", name] = f"tl.cast(params[{slot}], tl.{'int32' if kind is Kind.INT else 'float32'})"
    for slot, name in enumerate(program.tensors, start=len(program.scalars)):
        leaves["load", name] = f"params[{slot}]"
    return leaves
