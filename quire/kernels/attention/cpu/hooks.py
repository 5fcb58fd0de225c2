"""A variant's hooks on CPU: a C++ header for csrc/cpu/attention.cpp, compiled once, and parameters as C sees them.

Owns the text of the header and the loading of what it makes. Does not own how nodes are written (lowering.py), what
`quire_*` functions do (csrc/cpu/functions.h), nor the cache on disk (jit.py). Invariant: a variant without hooks runs
on the library that was built with the package, and needs no compiler.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import weakref
from collections.abc import Callable

import torch

from quire.kernels import jit, native
from quire.kernels.attention.variant import COORDINATES, MAX_PARAMS, Program, Variant, lowering
from quire.kernels.attention.variant.expression import COMPARISONS, Expr, Kind, where

C_TYPES = {torch.float32: "float", torch.int32: "int32_t", torch.uint8: "uint8_t", torch.bool: "bool"}

TARGET = dataclasses.replace(
    lowering.C,
    templates={**lowering.C.templates, "floordiv": "quire_floordiv({0}, {1})", "mod": "quire_mod({0}, {1})"},
)
"""Vectors have no instruction for the division of integers."""

FUNCTIONS = {
    "query_transform": ("query", "vf x, vf partner, const Site& at, vi dim"),
    "key_transform": ("key", "vf x, vf partner, const Site& at, vi dim"),
    "value_transform": ("value", "vf x, vf partner, const Site& at, vi dim"),
    "logits_transform": ("logits", "vf x, const Site& at, vi k_pos"),
    "logits_mask": ("mask", "const Site& at, vi k_pos"),
    "output_transform": ("output", "vf x, const Site& at, vi dim"),
}
"""Hook → its function in C++: name and arguments, see csrc/cpu/plain_variant.h."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """What `cpu.run` calls for a variant."""

    function: Callable[..., None]
    scalars: ctypes.Array[ctypes.c_float]
    tensors: ctypes.Array[ctypes.c_void_p]


_compiled: weakref.WeakKeyDictionary[Variant, dict[tuple[object, ...], Compiled]] = weakref.WeakKeyDictionary()


def obstacle(variant: Variant, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the hooks of this variant cannot run, or None. Builds them if they were never built."""
    try:
        compiled(variant, dtype, kv_dtype)
    except jit.BuildError as error:
        return f"the variant's hooks are not compiled, so the slower torch path runs: {error}"
    return None


def compiled(variant: Variant, dtype: torch.dtype, kv_dtype: torch.dtype) -> Compiled:
    """The function that computes this variant of q of `dtype`, and its parameters. Raises jit.BuildError."""
    if variant.built_in:
        return Compiled(native.required().quire_attention, _NO_SCALARS, _NO_TENSORS)
    known = _compiled.setdefault(variant, {})
    key = native.choice().level, dtype, kv_dtype
    if key not in known:
        known[key] = Compiled(
            _function(header(variant.program, dtype, kv_dtype), native.choice().level),
            (ctypes.c_float * MAX_PARAMS)(*variant.scalars.values()),
            (ctypes.c_void_p * MAX_PARAMS)(*(tensor.data_ptr() for tensor in variant.tensors.values())),
        )
    return known[key]


_NO_SCALARS = (ctypes.c_float * MAX_PARAMS)()
_NO_TENSORS = (ctypes.c_void_p * MAX_PARAMS)()


@functools.cache
def _function(text: str, level: str) -> Callable[..., None]:
    sources = [jit.sources_folder() / "cpu" / name for name in ("attention.cpp", "threads.cpp")]
    path = jit.shared_library("attention_cpu", sources, native.build_flags(level), text, "c++")
    return native.open_variant(path, "quire_attention").quire_attention


def header(program: Program, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """The generated header: `struct Variant` of csrc/cpu/plain_variant.h with the hooks of a program."""
    flags = {f"has_{name}": hook in program.hooks for hook, (name, _) in FUNCTIONS.items()}
    flags["softmax"] = program.softmax
    flags["has_partner"] = any(node.op == "partner" for expr in program.hooks.values() for node in expr.walk())
    lines = [
        "#define QUIRE_VARIANT 1",
        f"#define QUIRE_ONLY_DTYPE {native.DTYPES[dtype]}",
        f"#define QUIRE_ONLY_INT8 {int(kv_dtype == torch.int8)}",
        '#include "functions.h"',
        "namespace quire {",
        "struct Variant {",
        *(f"    static constexpr bool {name} = {str(on).lower()};" for name, on in flags.items()),
    ]
    for hook, expr in program.hooks.items():
        name, arguments = FUNCTIONS[hook]
        statements, value = lowering.source(_without_boolean_numbers(expr, {}), TARGET, _leaves(hook, program))
        result = "vi" if expr.kind is Kind.BOOL else "vf"
        lines.append(f"    QUIRE_INLINE {result} {name}({arguments}, const QuireAttnArgs& a) {{")
        lines += [f"        {statement}" for statement in [*statements, f"return lanes({value});"]]
        lines.append("    }")
    return "\n".join([*lines, "};", "}  // namespace quire", ""])


def _leaves(hook: str, program: Program) -> dict[tuple[str, str], str]:
    arguments = FUNCTIONS[hook][1]
    leaves = {}
    for coordinate in COORDINATES[hook]:
        leaves["site", coordinate] = coordinate if f"vi {coordinate}" in arguments else f"at.{coordinate}"
    leaves |= {("value", "x"): "x"} if "vf x" in arguments else {}
    leaves |= {("partner", "half"): "partner"} if "vf partner" in arguments else {}
    for slot, (name, kind) in enumerate(program.scalars.items()):
        leaves["scalar", name] = f"(int32_t)a.scalars[{slot}]" if kind is Kind.INT else f"a.scalars[{slot}]"
    for slot, (name, dtype) in enumerate(program.tensors.items()):
        leaves["load", name] = f"(const {C_TYPES[dtype]}*)a.tensors[{slot}]"
    return leaves


def _without_boolean_numbers(expr: Expr, done: dict[int, Expr]) -> Expr:
    """The same tree with booleans that are converted or compared written as where(b, 1.0, 0.0).

    Lanes of booleans are 0 and -1, and have the C++ type of lanes of integers. Shared nodes stay shared.
    """
    if id(expr) not in done:
        args = tuple(_without_boolean_numbers(arg, done) for arg in expr.args)
        if expr.op == "float" or expr.op in COMPARISONS:
            args = tuple(where(arg, 1.0, 0.0) if arg.kind is Kind.BOOL else arg for arg in args)
        if expr.op == "float" and args[0].kind is Kind.FLOAT:
            done[id(expr)] = args[0]
        else:
            done[id(expr)] = expr if not args else dataclasses.replace(expr, args=args)
    return done[id(expr)]
