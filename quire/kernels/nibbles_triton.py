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
MX_BLOCK = tl.constexpr(32)
UNIT = tl.constexpr(4096.0)
"""What numbers in NVFP4 are less by, without their factors: they are below 1 then, and no product with an activation is
larger than that. In float16 they still are exact: multiples of 2^-22 with six bits."""


@triton.jit
def columns():  # type: ignore[no-untyped-def]
    """[64]: which column lies at each place of a block: the inverse of `nibbles.place`."""
    at = tl.arange(0, BLOCK)
    step = at // 8 % 2 * 2 + at // 2 % 2
    return step * 16 + at % 2 * 8 + at // 16 * 2 + at // 4 % 2


@triton.jit
def e2m1(code):  # type: ignore[no-untyped-def]
    """The number of 4 bits, in float32."""
    size, low = (code >> 1) & 3, (code & 1).to(tl.float32)
    whole = tl.where(size == 3, 4.0, tl.where(size == 2, 2.0, 1.0))
    magnitude = tl.where(size == 0, 0.5 * low, whole * (1.0 + 0.5 * low))
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2^(exponent - 127), in float32, of 0 to 254."""
    # Two factors: 2^-127 is no normal number.
    upper = exponent // 2
    return ((upper + 64) << 23).to(tl.float32, bitcast=True) * ((exponent - upper + 63) << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit
def e4m3_in_units(bits):  # type: ignore[no-untyped-def]
    """bits: int32, those of an e4m3 that is no NaN → it / `UNIT`, in float32. Not all GPUs convert e4m3."""
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).to(tl.float32)
    size = tl.where(exponent == 0, mantissa, mantissa + 8.0)
    size *= ((tl.maximum(exponent, 1) + 105) << 23).to(tl.float32, bitcast=True)  # 2^(exponent - 10 - 12)
    return tl.where((bits & 128) != 0, -size, size)


@triton.jit  # type: ignore[untyped-decorator]
def numbers(  # type: ignore[no-untyped-def]
    codes, scales, row, is_row, start, line_step, row_step,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FP4: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Columns start .. start + 63 of the rows `row` [BN] of a matrix [n, K] → [BN, 64] float32, ordered as `columns`.

    codes, scales: pointers, see `Int4Weight` and `Fp4Weight`; line_step, row_step: between lines of scales, and in one.
    start: a multiple of 64. Those beyond K are finite. FP4 in groups of 16 (NVFP4): in `UNIT`s, without factors.
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
    if FP4 and GROUP == MX_BLOCK:
        made = e2m1(code) * power_of_two(scale.to(tl.int32))[:, :, None]
    elif FP4:  # a word has codes of two groups, those of the second in the nibbles whose number has bit 1
        inside = is_row[:, None] & (column + GROUP < K)[None, :]
        upper = tl.load(scales + group_at + line_step, mask=inside, other=0)
        is_upper = (tl.arange(0, 8) & 2)[None, None, :] != 0
        both = tl.where(is_upper, upper.to(tl.int32)[:, :, None], scale.to(tl.int32)[:, :, None])
        made = e2m1(code) * e4m3_in_units(both)
    else:
        zero = tl.full([BN, 8], MIDDLE, tl.float32)
        if ZEROS:
            zero = tl.load(scales + group_at + line_step, mask=inside, other=0.0).to(tl.float32)
        made = (code.to(tl.float32) - zero[:, :, None]) * scale.to(tl.float32)[:, :, None]
    return tl.reshape(made, [BN, BLOCK])
