"""Run by `test_kernel_lora.py`: compiles the kernels of adapters for Hopper, without a GPU."""

from __future__ import annotations

import brief  # noqa: F401
import torch
from compiled import build

from quire.kernels.lora import triton

SHAPE = {"TILE": 16, "BLOCK_RANK": 16, "DEPENDENT": True}


def build_both(
    norm: bool, parts: int, sums: int, most: int, dtype: str = "*bf16", activates: bool = False, many: bool = False
) -> None:
    shape = SHAPE | {"MOST": most, "N_PARTS": parts, "HAS_NORM": norm, "N_SUMS": sums}
    build(
        triton._shrink, f"{dtype} i32 {dtype} i64 *i32 i32 *i32 *i32 {dtype} *fp32 *fp32 i32 i32", stages=1,
        warps=triton.SLICES, waits=True, also=("k", "step"), PER_PART=most // 16, SLICES=triton.SLICES,
        SLICE=triton.SLICE, **shape,
    )  # fmt: skip
    build(
        triton._expand, f"{dtype} i32 {dtype} i32 {dtype} i64 *i32 i32 *i32 *i32 *i32 *fp32 *fp32 fp32 fp32",
        stages=1, warps=triton.EXPAND_WARPS, waits=True, also=("half",), ACTIVATES=activates, EVEN=True, MANY=many,
        BLOCK_OUT=triton.BLOCK_OUT, **shape,
    )  # fmt: skip


def main() -> None:
    build_both(True, 3, 8, 16)
    build_both(True, 2, 8, 16, activates=True)
    build_both(True, 2, 8, 16, activates=True, many=True)
    build_both(False, 1, 14, 16)
    build_both(True, 3, 8, 256, "*fp32")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    print("fine")
