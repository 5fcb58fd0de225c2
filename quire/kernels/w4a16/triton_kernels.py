"""The kernel of `triton`: rows of x by weights made of 4-bit codes, integers in groups or e2m1 in blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import nibbles_triton as nibbles


@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    x, x_stride, codes, scales, factors, bias, y, m, n,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FP4: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM rows of x by BN of the matrix; neighbours share the rows of the matrix."""
    m_tiles = tl.cdiv(m, BM)
    row = tl.program_id(0) % m_tiles * BM + tl.arange(0, BM)
    column = tl.program_id(0) // m_tiles * BN + tl.arange(0, BN)
    k = nibbles.columns()
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    is_row, is_column = row < m, column < n
    sums = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, 64):
        a = tl.load(x_at + start, mask=is_row[:, None] & (k < K - start)[None, :], other=0.0)
        b = nibbles.numbers(codes, scales, column, is_column, start, n, 1, K, GROUP, ZEROS, FP4, BN)
        sums = tl.dot(a, tl.trans(b).to(a.dtype), sums, input_precision="ieee")
    if factors is not None:
        sums *= nibbles.UNIT * tl.load(factors + column, mask=is_column, other=0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = y + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
