"""Codes of 4 bits inside Triton kernels: 64 columns of some rows as numbers, in the order in which they lie in memory.

Owns how they are read. Does not own the layout (`nibbles`). Invariant: words are read once each, where reading codes in
the order of columns would read each word eight times; who multiplies by them takes its own columns in `columns`' order.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
"""`nibbles.BLOCK`: columns that are read at once."""
MIDDLE = tl.constexpr(8.0)


@triton.jit
def columns():  # type: ignore[no-untyped-def]
    """[64]: which column lies at each place of a block: the inverse of `nibbles.place`."""
    at = tl.arange(0, BLOCK)
    step = at // 8 % 2 * 2 + at // 2 % 2
    return step * 16 + at % 2 * 8 + at // 16 * 2 + at // 4 % 2


@triton.jit
def fp4(code, exponent):  # type: ignore[no-untyped-def]
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
def numbers(  # type: ignore[no-untyped-def]
    codes, scales, row, is_row, start, line_step, row_step,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FP4: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Columns start .. start + 63 of the rows `row` [BN] of a matrix [n, K] → [BN, 64] float32, ordered as `columns`.

    codes, scales: pointers, see `Int4Weight` and `Fp4Weight`; line_step, row_step: between lines of scales, and in one.
    start: a multiple of 64. Those beyond K are finite.
    """
    WORDS: tl.constexpr = (K + 63) // 64 * 8
    word = tl.arange(0, 8)
    at = codes + row.to(tl.int64)[:, None] * WORDS + start // 8 + word[None, :]
    words = tl.load(at, mask=is_row[:, None], other=0)
    code = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    column = start + word % 2 * 32  # words take turns with the halves of 64 columns
    group_at = (column // GROUP * (2 if ZEROS else 1))[None, :] * line_step + row[:, None] * row_step
    inside = is_row[:, None] & (column < K)[None, :]
    scale = tl.load(scales + group_at, mask=inside, other=0)
    if FP4:
        made = fp4(code, scale.to(tl.int32)[:, :, None])
    else:
        zero = tl.full([BN, 8], MIDDLE, tl.float32)
        if ZEROS:
            zero = tl.load(scales + group_at + line_step, mask=inside, other=0.0).to(tl.float32)
        made = (code.to(tl.float32) - zero[:, :, None]) * scale.to(tl.float32)[:, :, None]
    return tl.reshape(made, [BN, BLOCK])
