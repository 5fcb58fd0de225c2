"""Run by `test_kernel_lora.py`: compiles the kernels of adapters for Hopper, without a GPU."""

from __future__ import annotations

import torch
from compiled import build

from quire.kernels.lora import triton

SHAPE = {"MOST": 16, "N_PARTS": 3, "TILE": 16, "BLOCK_RANK": 16}


def main() -> None:
    for norm in (True, False):
        build(
            triton._shrink, "*bf16 i32 *bf16 i64 *i32 i32 *i32 *i32 *bf16 *fp32 *fp32 i32 i32 i32", PER_PART=1,
            HAS_NORM=norm, BLOCK_IN=triton.BLOCK_IN, **SHAPE,
        )  # fmt: skip
        build(
            triton._expand, "*bf16 i32 *bf16 i64 *i32 i32 *i32 *i32 *i32 *fp32 *fp32 i32 fp32 fp32", N_SUMS=8,
            HAS_NORM=norm, BLOCK_OUT=triton.BLOCK_OUT, **SHAPE,
        )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    print("fine")
