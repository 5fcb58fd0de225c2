"""Run by `test_kernel_mla.py`: compiles the kernels of latent attention for Hopper, without a GPU, and bounds their
shared memory."""

from __future__ import annotations

import sys
import types

import brief  # noqa: F401
import torch
from compiled import build

from quire.kernels.attention.schedule.plan import Heads
from quire.kernels.attention.triton import latent, latent_kernels
from quire.kernels.gemm import rows_kernel
from quire.kernels.mla import triton as mla


def attend(rows: int, dtype: torch.dtype = torch.bfloat16, group: int = 16) -> None:
    """rows: of a small line, or 128 for large ones; over lines of 512 + 64."""
    q, of = torch.empty(0, dtype=dtype), "*fp32" if dtype == torch.float32 else "*bf16"
    plan = types.SimpleNamespace(heads=Heads(group, 1, 576, 512), page_size=16)
    is_large = rows == latent.LARGE_ROWS
    rows = 64 if is_large and q.element_size() == 2 else 16 if is_large else rows
    constants = latent._constants(plan, q, rows, q) | ({"CHUNKS": latent.LARGE_ROWS // rows} if is_large else {})
    kernel = latent_kernels.large if is_large else latent_kernels.small
    lists = "*i32" if is_large else "*i32 *i32"
    build(
        kernel, f"{lists} {of} {of} {of} *fp32 *i32 *i32 *fp32 *fp32 i32 i32 i32 i32 fp32",
        warps=constants.pop("num_warps"), stages=constants.pop("num_stages"), **constants,
    )  # fmt: skip


def store() -> None:
    build(
        mla._store, "*bf16 i32 *bf16 fp32 *bf16 i32 i32 *bf16 i32 i32 *i64 *fp32 *bf16 *i64", N_HEADS=128, RANK=512,
        HALF=32, HEADS=16, BLOCK_RANK=512, BLOCK_HALF=32,
    )  # fmt: skip


def rows() -> None:
    build(
        rows_kernel._multiply, "*bf16 *bf16 *bf16 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32", warps=4, stages=3,
        M=512, K=128, ROWS=rows_kernel.ROWS, COLUMNS=rows_kernel.COLUMNS, DEPTH=rows_kernel.DEPTH,
    )  # fmt: skip


CASES = {
    "16": lambda: attend(16),
    "32": lambda: attend(32),
    "64": lambda: attend(64),
    "large": lambda: attend(128),
    "large 128": lambda: attend(128, group=128),
    "float32": lambda: attend(16, torch.float32),
    "float32 large": lambda: attend(128, torch.float32),
    "store": store,
    "rows": rows,
}
QUICK = ("16", "large", "store", "rows")
"""What the test-suite compiles; all by hand: `python compiled_latent.py all`."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in CASES if sys.argv[1:] == ["all"] else QUICK:
        CASES[name]()
    print("fine")
