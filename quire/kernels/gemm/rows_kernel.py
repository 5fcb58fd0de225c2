"""Products whose rows are alone, of any size, in Triton: one tile for any number of rows, all of k in one program.

A row is summed by the same instructions in the same order, whatever stands in the other rows of its tile. Products of
several heads are one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 64, 64, 64


def multiply(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[i, h] = x[i, h] @ w[h].T, summed in float32 and rounded once.

    x: [n, heads, k]; w: [heads, m, k]; out: [n, heads, m] of any floating type; any strides. Returns out.
    """
    (n, heads, k), m = x.shape, w.shape[1]
    if n:
        _multiply[(triton.cdiv(n, ROWS), triton.cdiv(m, COLUMNS), heads)](
            x, w, out, n, *x.stride(), *w.stride(), *out.stride(), M=m, K=k, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x, w, out, n, x_row, x_head, x_k, w_head, w_row, w_k, out_row, out_head, out_column,
    M: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    head, depth = tl.program_id(2).to(tl.int64), tl.arange(0, DEPTH)
    x += head * x_head + rows * x_row
    w += head * w_head + columns[None, :] * w_row
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, DEPTH):
        at = first + depth
        a = tl.load(x + at[None, :] * x_k, mask=(rows < n) & (at < K)[None, :], other=0.0)
        b = tl.load(w + at[:, None] * w_k, mask=(at < K)[:, None] & (columns < M)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    target = out + head * out_head + rows * out_row + columns[None, :] * out_column
    tl.store(target, total.to(out.dtype.element_ty), mask=(rows < n) & (columns < M)[None, :])
