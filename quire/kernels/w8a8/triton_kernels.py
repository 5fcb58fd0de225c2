"""The kernels of `triton`: rows in 8 bits, and products of these with sums in float32, or exact ones of integers."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(1e-10)
HALF_UP = tl.constexpr(12582912.0)
"""1.5 * 2^23: what float32 adds to it is rounded to a whole number, ties to even."""


@triton.jit  # type: ignore[untyped-decorator]
def _code(v, scale, LARGEST: tl.constexpr, INT: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    divided = tl.minimum(tl.maximum(tl.div_rn(v, scale), -LARGEST), LARGEST)
    if INT:
        divided = (divided + HALF_UP) - HALF_UP
    return divided.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def round_rows(  # type: ignore[no-untyped-def]
    x, x_stride, codes, codes_stride, scales, k,
    LARGEST: tl.constexpr, INT: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if GIVEN:
        scale = tl.load(scales)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, k, BLOCK):
            v = tl.load(x + row * x_stride + start + at, mask=at < k - start, other=0.0)
            largest = tl.maximum(largest, tl.abs(v.to(tl.float32)))
        scale = tl.div_rn(tl.maximum(tl.max(largest, 0), LEAST), LARGEST + 0.0)
        tl.store(scales + row, scale)
    for start in range(0, k, BLOCK):
        v = tl.load(x + row * x_stride + start + at, mask=at < k - start, other=0.0).to(tl.float32)
        made = _code(v, tl.broadcast_to(scale, [BLOCK]), LARGEST, INT, codes.dtype.element_ty)
        tl.store(codes + row * codes_stride + start + at, made, mask=at < k - start)


@triton.jit  # type: ignore[untyped-decorator]
def round_blocks(  # type: ignore[no-untyped-def]
    x, x_stride, codes, codes_stride, scales, rows, k,
    LARGEST: tl.constexpr, INT: tl.constexpr, GROUP: tl.constexpr, N_GROUPS: tl.constexpr,
):  # fmt: skip
    """A program has N_GROUPS groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * N_GROUPS + tl.arange(0, N_GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    v = tl.load(x + row * x_stride + at, mask=at < k, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(v), 1), LEAST), tl.full([N_GROUPS], LARGEST, tl.float32))
    spread = tl.broadcast_to(scale[:, None], [N_GROUPS, GROUP])
    tl.store(codes + row * codes_stride + at, _code(v, spread, LARGEST, INT, codes.dtype.element_ty), mask=at < k)
    tl.store(scales + group * rows + row, scale, mask=group * GROUP < k)


@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    x, x_stride, x_scales, x_rows, w, w_scales, bias, y, m, n,
    K: tl.constexpr, X_STEP: tl.constexpr, W_STEP: tl.constexpr, BLOCKS: tl.constexpr,
    INT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of x by BN of w, which are within one block of scales; neighbours share the rows of w."""
    N_BLOCKS: tl.constexpr = (K + BK - 1) // BK
    m_tiles = tl.cdiv(m, BM)
    row = tl.program_id(0) % m_tiles * BM + tl.arange(0, BM)
    first = tl.program_id(0) // m_tiles * BN
    column = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + column.to(tl.int64)[None, :] * K + k[:, None]
    is_row, is_column = row < m, column < n
    sums = tl.zeros([BM, BN], tl.int32 if INT else tl.float32)
    for i in range(N_BLOCKS):
        inside = k < K - i * BK
        a = tl.load(x_at + i * BK, mask=is_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(w_at + i * BK, mask=is_column[None, :] & inside[:, None], other=0.0)
        if INT:
            sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        elif BLOCKS:
            part = tl.dot(a, b)
            own = tl.load(x_scales + i * x_rows + row, mask=is_row, other=0.0)
            sums += part * (own * tl.load(w_scales + first // BK * N_BLOCKS + i))[:, None]
        else:
            sums = tl.dot(a, b, sums, max_num_imprecise_acc=BK)
    total = sums.to(tl.float32)
    if not BLOCKS:
        own = tl.load(x_scales + row * X_STEP, mask=is_row, other=0.0)
        theirs = tl.load(w_scales + column * W_STEP, mask=is_column, other=0.0)
        total = total * own[:, None] * theirs[None, :]
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = y + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
