"""Run by `test_kernels_triton.py`: compiles every kernel for Hopper, without a GPU, and bounds its shared memory."""

from __future__ import annotations

import sys

import brief  # noqa: F401
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.kernels.act import triton as act
from quire.kernels.kvstore import triton as kvstore
from quire.kernels.moe import triton as moe
from quire.kernels.moe import triton_kernels as moe_kernels
from quire.kernels.moe import triton_products as moe_products
from quire.kernels.norm import triton as norm
from quire.kernels.qkv import triton as qkv
from quire.kernels.w4a16 import triton_kernels as words

SHARED_BYTES = 227 * 1024
"""What one program may take on an H100 or H200."""


def build(
    kernel: object, types: str, warps: int = 4, stages: int = 3, waits: bool = False, also: tuple[str, ...] = (),
    **constants: int | None,
) -> None:  # fmt: skip
    """types: of the arguments that are no constants, in order. Pointers and strides are multiples of 16, as usual.
    waits: launched before the kernel before it has ended; also: further multiples."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [
        name
        for name in names
        if signature[name].startswith("*") or name.endswith(("_stride", "_row", "_place")) or name in also
    ]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=hints)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": waits}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".entry" in built.asm["ptx"] and ("griddepcontrol.wait" in built.asm["ptx"]) == waits
    assert built.metadata.shared <= SHARED_BYTES, (kernel, constants, built.metadata.shared)


def build_qkv(d: int, rotary: int, warps: int, pages: str = "*bf16", **no_norms: None) -> None:
    """32 query heads and 8 KV heads."""
    pointers = [name for name in ("q_norm", "k_norm") if name not in no_norms]
    kind = {"*bf16": qkv.PLAIN, "*fp8e4nv": qkv.E4M3, "*i8": qkv.INT8}[pages].value
    scales = "*fp32" if kind == qkv.INT8.value else "fp32"
    types = f"*bf16 i32 *bf16 {'*bf16 ' * len(pointers)} fp32 *i64 *fp32 {pages} {pages} *i64 {scales} {scales}"
    build(
        qkv._rotate_and_store, types, warps=warps, **no_norms, KIND=kind,
        N_Q=32, N_KV=8, D=d, HALF=rotary // 2, PAGE=16, HEADS=8, Q_GROUPS=4, KV_GROUPS=1,
        BLOCK_D=triton.next_power_of_2(d), BLOCK_HALF=triton.next_power_of_2(rotary // 2),
        BLOCK_REST=triton.next_power_of_2(max(1, d - rotary)),
    )  # fmt: skip


def build_moe(
    n_rows: int, codes: str = "", scales: str = "", group: int = 0, factors: str = "", deltas: str = ""
) -> None:
    """Products of 128 experts of 768 in a block of n_rows. codes, scales, factors: pointers, of matrices in numbers of
    4 bits or e4m3, which have blocks of `group`; deltas: to what adapters add."""
    in_words = codes == "*i32"
    is_rounded, kinds = codes == "*fp8e4nv", {"*i32": moe_products.FP4, "*fp8e4nv": moe_products.E4M3}
    tile = moe._tile(n_rows, torch.float8_e4m3fn if is_rounded else torch.bfloat16)
    sizes = {"HIDDEN": 2048, "INNER": 768, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "ZEROS": False}
    sizes |= {
        "MATRIX": 2 * 768 * 2048 // (8 if in_words else 1),
        "SCALES": 2 * 768 * 2048 // group if in_words else 192,
    }
    sizes |= {"KEPT": kinds[codes].value if codes else 0, "GROUP": group}
    launch = {"warps": tile.n_warps, "stages": tile.n_stages, "biases": None} | ({} if codes else {"scales": None})
    launch |= {name: None for name, one in (("factors", factors), ("deltas", deltas)) if not one}
    matrices = f"{codes or '*bf16'} {scales} {factors} {deltas}"
    rows = "*fp8e4nv i32 *fp32" if is_rounded else "*bf16 i32"
    for kernel, types, more in (
        (moe_products.up, f"{rows} i32 *i32 i32 *i32 {matrices} *bf16 fp32 fp32 fp32", {"K": 8, "LIMITED": False}),
        (moe_products.down, f"{rows} i32 *i32 i32 *i32 {matrices} *fp32 *bf16", {}),
    ):
        none = {} if is_rounded else {"x_scales" if kernel is moe_products.up else "inner_scales": None}
        build(kernel, types, **launch, **more, **none, **sizes)


def build_words(group: int, scales: str, **more: bool | None) -> None:
    """A product with a matrix of 4 bits [n, 4096]."""
    types = f"*bf16 i32 *i32 {scales} {'' if 'factors' in more else '*fp32'} *bf16 *bf16 i32 i32"
    constants = {"K": 4096, "GROUP": group, "ZEROS": False, "FP4": True, "BM": 16, "BN": 64}
    build(words.product, types, **constants | more)


def build_choice() -> None:
    """8 of 256 experts, of 4 of 8 groups, and their places."""
    build(
        moe_kernels.route, "*fp32 i32 *fp32 *i64 *i32 *fp32 fp32 fp32", warps=1, E=256, E_PAD=256, K=8, K_PAD=8,
        SIGMOID=True, MIXER=False, EVEN=False, RENORMALISE=True, G=8, G_PAD=8, G_CHOSEN=4, G_BEST=2,
    )  # fmt: skip
    build(moe_kernels.count, "*i32 *i32 *i32 i32", BLOCK=256)
    for n, block in ((128, 256), (4096, 16)):  # experts; and four adapters of 1,024, the most there can be
        build(moe_kernels.place, "*i32 *i32 *i32 *i32 *i32 i32 i32", warps=8, E=n, E_PAD=n, BM=16, BLOCK=block)
    build(moe_kernels.add, "*bf16 *i32 *bf16 i32", HIDDEN=2048, K=8, ADDS=True, BLOCK=1024)


CASES = {
    "moe": lambda: build_moe(16),
    "moe many": lambda: build_moe(128),
    "moe words": lambda: build_moe(128, "*i32", "*u8", 32),
    "moe words, factors": lambda: build_moe(16, "*i32", "*u8", 16, "*fp32"),
    "moe e4m3": lambda: build_moe(16, "*fp8e4nv", "*fp32"),
    "moe e4m3 blocks": lambda: build_moe(128, "*fp8e4nv", "*fp32", 128),
    "moe adapters": lambda: build_moe(128, deltas="*bf16"),
    "moe words, adapters": lambda: build_moe(16, "*i32", "*u8", 32, deltas="*bf16"),
    "moe e4m3, adapters": lambda: build_moe(16, "*fp8e4nv", "*fp32", deltas="*bf16"),
    "words int4": lambda: build_words(128, "*bf16", ZEROS=True, FP4=False, factors=None),
    "words mxfp4": lambda: build_words(32, "*u8", factors=None),
    "words nvfp4": lambda: build_words(16, "*u8"),
    "moe choice": build_choice,
    "norm": lambda: build(norm._norm, "*bf16 i32 i32 i32 *bf16 i32 *bf16 *bf16 i32 fp32", ADD=True, BLOCK=4096),
    "act": lambda: build(act._silu_mul, "*bf16 i32 *bf16 i32", BLOCK=1024),
    "qkv": lambda: build_qkv(128, 128, warps=2),
    "qkv codes": lambda: build_qkv(128, 128, warps=2, pages="*fp8e4nv"),
    "qkv integers": lambda: build_qkv(128, 128, warps=2, pages="*i8"),
    "qkv partial": lambda: build_qkv(80, 20, warps=2, q_norm=None, k_norm=None),
    "qkv large": lambda: build_qkv(256, 256, warps=4, k_norm=None),
    "copy": lambda: build(kvstore._copy, "*bf16 *bf16 *i32", HEADS=8, PAGE=16, D=128, BLOCK_P=16, BLOCK_D=128),
}  # fmt: skip

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
    print("fine")
