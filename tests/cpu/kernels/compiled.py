"""Run by `test_kernels_triton.py`: compiles every kernel for Hopper, without a GPU, and bounds its shared memory."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.kernels.act import triton as act
from quire.kernels.kvstore import triton as kvstore
from quire.kernels.norm import triton as norm
from quire.kernels.rope import triton as rope

SHARED_BYTES = 227 * 1024
"""What one program may take on an H100 or H200."""


def build(kernel: object, types: str, warps: int = 4, stages: int = 3, **constants: int) -> None:
    """types: of the arguments that are no constants, in order. Pointers and strides are multiples of 16, as usual."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if signature[name].startswith("*") or name in ("q_row_stride", "q_head_stride")]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=hints)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".entry" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED_BYTES, (kernel, constants, built.metadata.shared)


CASES = {
    "norm": lambda: build(norm._norm, "*bf16 i32 i32 i32 *bf16 i32 *bf16 *bf16 i32 fp32", ADD=True, BLOCK=4096),
    "act": lambda: build(act._silu_mul, "*bf16 i32 *bf16 i32", BLOCK=1024),
    "rope": lambda: build(
        rope._rope, "*bf16 i32 i32 *bf16 i32 i32 *i64 *fp32 i32",
        HQ=32, HK=8, HALF=64, BLOCK_Q=32, BLOCK_K=8, BLOCK=64,
    ),
    "store": lambda: build(
        kvstore._store, "*bf16 i32 i32 *bf16 i32 i32 *bf16 *bf16 *i64 i32",
        HEADS=8, PAGE=16, D=80, BLOCK_H=8, BLOCK_D=128,
    ),
    "copy": lambda: build(kvstore._copy, "*bf16 *bf16 *i32", HEADS=8, PAGE=16, D=128, BLOCK_P=16, BLOCK_D=128),
}  # fmt: skip

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
    print("fine")
