"""Run by `test_attention_triton.py`: compiles the kernels for Hopper, without a GPU, and bounds their shared memory."""

from __future__ import annotations

import sys
import time
import types

import brief  # noqa: F401
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_case import VARIANTS, Case

from quire.kernels.attention.schedule.plan import Heads, Layout
from quire.kernels.attention.triton import hooks as triton_hooks
from quire.kernels.attention.triton import kernels as triton_kernels
from quire.kernels.attention.triton import launcher as attention
from quire.kernels.attention.triton import states as triton_states
from quire.kernels.attention.variant import Variant

SHARED_BYTES = 227 * 1024
"""What one program may take on an H100 or H200."""

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv",
         torch.int8: "*i8", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1"}  # fmt: skip
INTEGERS = ("q_row_stride", "q_head_stride", "k_page", "k_head", "k_token", "v_page", "v_head", "v_token", "n_kv_heads",
            "window", "n_first")  # fmt: skip


def build(kernel: object, variant: Variant, dtype: torch.dtype, kv_dtype: torch.dtype, constants: dict) -> object:
    """Pointers and strides are multiples of 16, as usual."""
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    params = triton_hooks.of(variant).params
    types_of = {"q": TYPES[dtype], "out": TYPES[dtype], "k": TYPES[kv_dtype], "v": TYPES[kv_dtype], "scale": "fp32",
                **dict.fromkeys(("k_scale", "v_scale"), "*fp32" if kv_dtype == torch.int8 else "fp32"),
                "outs": TYPES[dtype], **dict.fromkeys(("lse", "lses"), "*fp32"), "n_states": "i32", "n_lines": "i32",
                "partial_out": "*fp32", "partial_lse": "*fp32"}  # fmt: skip
    types_of["param"] = tuple(TYPES[x.dtype] if isinstance(x, torch.Tensor) else "fp32" for x in params)
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: types_of.get(name, "i32" if name in INTEGERS else "*i32") for name in names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    sizes = [name for name in INTEGERS if name[:2] in ("q_", "k_", "v_")]
    aligned = [name for name in names if str(signature[name]).startswith("*") or name in sizes]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=hints)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".entry" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED_BYTES, (kernel, constants, built.metadata.shared)
    return built


def attend(
    head_dim: int,
    rows: int,
    variant: Variant,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    layout: Layout = Layout.PAGED,
    page_size: int = 16,
) -> object:
    """rows: of a small line, or 128 for large lines."""
    q = torch.empty(0, dtype=dtype)
    plan = types.SimpleNamespace(heads=Heads(8, 2, head_dim), layout=layout, page_size=page_size)
    if rows == attention.LARGE_ROWS:
        rows = attention._large_rows(q.element_size())
        constants = {"CHUNKS": attention.LARGE_ROWS // rows}
        kernel = triton_kernels.large
    else:
        constants, kernel = {}, triton_kernels.small
    constants |= attention._constants(plan, variant, q, torch.empty(0, dtype=kv_dtype or dtype), rows, q)
    return build(kernel, variant, dtype, kv_dtype or dtype, constants)


def merge(head_dim: int, variant: Variant) -> object:
    constants = {"GROUP": 4, "D": head_dim, "BLOCK_D": attention._padded(head_dim), "SOFTMAX": variant.softmax}
    constants |= {"HAS_LSE": True, **triton_hooks.of(variant).merging()}
    return build(triton_kernels.merge, variant, torch.bfloat16, torch.bfloat16, constants)


def states(head_dim: int, dtype: torch.dtype) -> None:
    """Numbers of states and of lines are of one kind, whatever they are: new ones compile nothing."""
    kernel, lines = triton_states._merge, triton_states.NUMBERS // triton.next_power_of_2(head_dim)
    constants = {"D": head_dim, "WIDTH": triton.next_power_of_2(head_dim), "LINES": lines}
    assert {one.name for one in kernel.params if one.do_not_specialize} == {"n_states", "n_lines"}
    build(kernel, Variant(1.0), dtype, dtype, constants | {"num_warps": 4})


def variant_of(name: str, head_dim: int = 128) -> Variant:
    return VARIANTS[name](Case([(40, 3)], Layout.PAGED, n_kv_heads=2, group=4, head_dim=head_dim))[0]


CASES = {
    **{f"{d} {rows}": (d, rows, "causal", {}) for d in (16, 64, 80, 96, 128, 192, 256) for rows in (16, 128)},
    "rows 32": (128, 32, "causal", {}),
    "rows 64": (256, 64, "causal", {}),
    "float32": (128, 128, "causal", {"dtype": torch.float32}),
    "float32 64": (64, 16, "causal", {"dtype": torch.float32}),
    "float32 256": (256, 16, "causal", {"dtype": torch.float32}),
    "fp8": (128, 16, "causal", {"kv_dtype": torch.float8_e4m3fn}),
    "fp8 128": (128, 128, "causal", {"kv_dtype": torch.float8_e4m3fn}),
    "int8": (128, 16, "causal", {"kv_dtype": torch.int8}),
    "int8 128": (128, 128, "causal", {"kv_dtype": torch.int8}),
    "fp8 256": (256, 16, "causal", {"kv_dtype": torch.float8_e4m3fn}),
    "window": (128, 128, "first and window", {"page_size": 48}),
    "ragged": (128, 128, "full", {"layout": Layout.RAGGED}),
    "sparse": (128, 16, "window", {"layout": Layout.SPARSE}),
    **{f"{name} {d} {rows}": (d, rows, name, {}) for name in ("rotary", "everything")
       for d, rows in ((128, 16), (128, 128), (256, 16), (256, 128))},
    **{name: (128, 16, name, {}) for name in ("soft cap", "alibi", "sinks", "sigmoid", "mask", "tree")},
}  # fmt: skip
"""Name → head size, rows, variant, and the rest of `attend`'s arguments."""

QUICK = ("256 128", "fp8", "sparse", "rotary 128 16", "tree")
"""What the test-suite compiles; all by hand: `python compiled_attention.py all`."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES if sys.argv[1:] == ["all"] else QUICK:
        head_dim, rows, name, others = CASES[case]
        variant = variant_of(name, head_dim)
        start_s = time.perf_counter()
        built = attend(head_dim, rows, variant, **others)
        if sys.argv[1:] == ["all"]:
            print(f"{case}: {built.metadata.shared} bytes, {time.perf_counter() - start_s:.1f} s", flush=True)
    merge(80, Variant(1.0))
    merge(128, variant_of("sinks"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        states(128, dtype)
    states(512, torch.bfloat16)
    print("fine")
