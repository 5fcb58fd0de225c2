"""The causal convolution in Triton: pieces of rows side by side, then the inputs that each line keeps."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _seen(  # type: ignore[no-untyped-def]
    x, x_stride, state, line, row, first, is_fresh, at, C, K: tl.constexpr
):
    """Inputs at `row` (one number) of a span that begins at row `first`; before that, those of its line."""
    back = row - first
    old = state + (line * (K - 1) + K - 1 + back) * C + at
    before = tl.load(old, mask=at < tl.where((back < 0) & (is_fresh == 0), C, 0), other=0.0)
    own = tl.load(x + row * x_stride + at, mask=at < tl.where(back >= 0, C, 0), other=0.0)
    return tl.where(back < 0, before, own)


@triton.jit  # type: ignore[untyped-decorator]
def convolve_pieces(  # type: ignore[no-untyped-def]
    x, x_stride, weight, bias, state, out, lines, fresh, piece_ptr, row_ptr, span_of, C,
    K: tl.constexpr, SILU: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One piece and block of columns a program."""
    piece = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < C
    span = tl.load(span_of + piece)
    line, is_fresh = tl.load(lines + span).to(tl.int64), tl.load(fresh + span)
    begin = tl.load(row_ptr + tl.load(piece_ptr + span)).to(tl.int64)
    first, end = tl.load(row_ptr + piece).to(tl.int64), tl.load(row_ptr + piece + 1).to(tl.int64)
    i = tl.arange(0, L)[:, None]
    n_before, n_rows = (first - begin).to(tl.int32), (end - first).to(tl.int32)
    of_piece = (i < n_rows) & inside[None, :]
    n_old = tl.where(is_fresh == 0, 0, -K)
    x += first * x_stride
    state += (line * (K - 1) + K - 1) * C
    y = tl.zeros((L, BLOCK), tl.float32)
    for j in tl.static_range(K):
        tap = tl.load(weight + at * K + j, mask=inside, other=0.0).to(tl.float32)
        row = i + (j - K + 1)
        back = row + n_before
        own = tl.load(x + row * x_stride + at[None, :], mask=of_piece & (back >= 0), other=0.0)
        before = tl.load(state + back * C + at[None, :], mask=of_piece & (back < n_old), other=0.0)
        y += tap[None, :] * (own.to(tl.float32) + before.to(tl.float32))
    if bias is not None:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = y * tl.sigmoid(y)
    tl.store(out + first * C + (i * C + at[None, :]), y.to(out.dtype.element_ty), mask=of_piece)


@triton.jit  # type: ignore[untyped-decorator]
def keep_inputs(  # type: ignore[no-untyped-def]
    x, x_stride, state, lines, fresh, piece_ptr, row_ptr, keep, C, K: tl.constexpr, BLOCK: tl.constexpr
):
    """One span and block of columns a program: snapshots first, then its own line, older inputs first, so that each is
    read before it is written."""
    span = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < C
    line, is_fresh = tl.load(lines + span).to(tl.int64), tl.load(fresh + span)
    first_piece, end_piece = tl.load(piece_ptr + span), tl.load(piece_ptr + span + 1)
    first = tl.load(row_ptr + first_piece).to(tl.int64)
    for piece in range(first_piece, end_piece):
        target = tl.load(keep + piece).to(tl.int64)
        if target >= 0:
            end = tl.load(row_ptr + piece + 1).to(tl.int64)
            for j in tl.static_range(K - 1):
                value = _seen(x, x_stride, state, line, end - (K - 1) + j, first, is_fresh, at, C, K)
                tl.store(state + (target * (K - 1) + j) * C + at, value, mask=inside)
    last = tl.load(row_ptr + end_piece).to(tl.int64)
    for j in tl.static_range(K - 1):
        value = _seen(x, x_stride, state, line, last - (K - 1) + j, first, is_fresh, at, C, K)
        tl.store(state + (line * (K - 1) + j) * C + at, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def convolve_rows(  # type: ignore[no-untyped-def]
    x, x_stride, weight, bias, state, out, lines, fresh, C, K: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr
):
    """One row, which is a span, and block of columns a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < C
    line, is_fresh = tl.load(lines + row).to(tl.int64), tl.load(fresh + row)
    y = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        value = _seen(x, x_stride, state, line, row - (K - 1) + j, row, is_fresh, at, C, K)
        y += tl.load(weight + at * K + j, mask=inside, other=0.0).to(tl.float32) * value.to(tl.float32)
    for j in tl.static_range(K - 1):
        value = _seen(x, x_stride, state, line, row - (K - 2) + j, row, is_fresh, at, C, K)
        tl.store(state + (line * (K - 1) + j) * C + at, value, mask=inside)
    if bias is not None:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y * tl.sigmoid(y)
    tl.store(out + row * C + at, y.to(out.dtype.element_ty), mask=inside)
