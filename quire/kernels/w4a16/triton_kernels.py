"""The kernel of `triton`: rows of x by weights made of 4-bit codes, integers in groups or e2m1 in blocks."""

from __future__ import annotations

import triton
import triton.language as tl

MIDDLE = tl.constexpr(8.0)


@triton.jit
def _place(column):  # type: ignore[no-untyped-def]
    """`kernels.nibbles.place`."""
    step, half, lane, odd = column // 16 % 4, column // 8 % 2, column // 2 % 4, column % 2
    return column // 64 * 64 + lane * 16 + step // 2 * 8 + odd * 4 + step % 2 * 2 + half


@triton.jit
def _fp4(code, exponent):  # type: ignore[no-untyped-def]
    """e2m1 times 2^(exponent - 127), in float32."""
    size, low = (code >> 1) & 3, (code & 1).to(tl.float32)
    whole = tl.where(size == 3, 4.0, tl.where(size == 2, 2.0, 1.0))
    magnitude = tl.where(size == 0, 0.5 * low, whole * (1.0 + 0.5 * low))
    # Two factors: 2^-127 is no normal number.
    upper = exponent // 2
    power = ((upper + 64) << 23).to(tl.float32, bitcast=True) * ((exponent - upper + 63) << 23).to(
        tl.float32, bitcast=True
    )
    return tl.where((code & 8) != 0, -magnitude, magnitude) * power


@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    x, x_stride, codes, scales, bias, y, m, n,
    K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FP4: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of x by BN of the matrix; neighbours share the rows of the matrix."""
    m_tiles = tl.cdiv(m, BM)
    row = tl.program_id(0) % m_tiles * BM + tl.arange(0, BM)
    column = tl.program_id(0) // m_tiles * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    words_at = codes + column.to(tl.int64)[None, :] * WORDS
    is_row, is_column = row < m, column < n
    sums = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        inside = k < K - start
        is_weight = is_column[None, :] & inside[:, None]
        a = tl.load(x_at + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        where = _place(start + k)[:, None]
        words = tl.load(words_at + where // 8, mask=is_weight, other=0)
        code = (words >> (where % 8 * 4)) & 15
        group_at = ((start + k) // GROUP * (2 if ZEROS else 1))[:, None] * n + column[None, :]
        scale = tl.load(scales + group_at, mask=is_weight, other=0)
        if FP4:
            b = _fp4(code, scale.to(tl.int32))
        else:
            zero = MIDDLE
            if ZEROS:
                zero = tl.load(scales + group_at + n, mask=is_weight, other=0.0).to(tl.float32)
            b = (code.to(tl.float32) - zero) * scale.to(tl.float32)
        sums = tl.dot(a, b.to(a.dtype), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = y + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
