"""A variant as the C++ header that the CUDA kernels include: `struct Site` and `struct Variant` (csrc/cuda).

Owns the text of the header. Does not own how nodes are written (lowering.py) nor what `quire_*` functions do
(csrc/cuda/functions.h). Invariant: equal programs give equal headers.
"""

from __future__ import annotations

import torch

from quire.kernels.attention.variant import COORDINATES, Program, lowering
from quire.kernels.attention.variant.expression import Kind

HOOKS = {
    "logits_transform": ("logits", "float s, const Site& at, const QuireAttnArgs& a", "float", "s"),
    "logits_mask": ("mask", "const Site& at, const QuireAttnArgs& a", "bool", "true"),
    "output_transform": ("output", "float o, const Site& at, float lse, const QuireAttnArgs& a", "float", "o"),
}
"""Hook → its function: name, arguments, result, and what it returns where the variant has no such hook."""

VALUES = {"logits_transform": "s", "output_transform": "o"}

C_TYPES = {torch.float32: "float", torch.int32: "int", torch.uint8: "unsigned char", torch.bool: "bool"}


def header(program: Program) -> str:
    """The generated header. Hooks that are not in `HOOKS` are the caller's to refuse."""
    flags = {
        "softmax": program.softmax,
        "causal": program.causal,
        "window": program.windowed,
        **{f"has_{HOOKS[hook][0]}": hook in program.hooks for hook in HOOKS},
    }
    lines = [
        "#pragma once",
        '#include "attention.h"',
        '#include "functions.h"',
        "struct Site { int q_row, q_pos, k_pos, q_head, kv_head, dim; };",
        "struct Variant {",
        *(f"    static constexpr bool {name} = {str(on).lower()};" for name, on in flags.items()),
    ]
    for hook, (name, arguments, result, neutral) in HOOKS.items():
        statements: list[str] = []
        value = neutral
        if hook in program.hooks:
            statements, value = lowering.source(program.hooks[hook], lowering.C, _leaves(hook, program))
        lines.append(f"    static __device__ __forceinline__ {result} {name}({arguments}) {{")
        lines += [f"        {statement}" for statement in [*statements, f"return {value};"]]
        lines.append("    }")
    return "\n".join([*lines, "};", ""])


def _leaves(hook: str, program: Program) -> dict[tuple[str, str], str]:
    leaves = {("site", name): "lse" if name == "lse" else f"at.{name}" for name in COORDINATES[hook]}
    if hook in VALUES:
        leaves["value", "x"] = VALUES[hook]
    for slot, (name, kind) in enumerate(program.scalars.items()):
        leaves["inverse", name] = f"a.inverses[{slot}]"
        leaves["scalar", name] = f"(int)a.scalars[{slot}]" if kind is Kind.INT else f"a.scalars[{slot}]"
    for slot, (name, dtype) in enumerate(program.tensors.items()):
        leaves["load", name] = f"((const {C_TYPES[dtype]}*)a.tensors[{slot}])"
    return leaves
