"""The scan of Mamba-2 in Triton: a program takes a span's pieces one after the other, its state in registers.

Within a piece outputs are a masked product of matrices (Dao and Gu 2024, section 6); between pieces only the state goes
on, so that nothing but inputs, outputs and the first and last state is read or written.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + e^x), which is x where that is large."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit  # type: ignore[untyped-decorator]
def scan_pieces(  # type: ignore[no-untyped-def]
    x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, a_log, d, dt_bias, state, out,
    lines, fresh, piece_ptr, row_ptr, keep, low, high,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, PER_GROUP: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span, head and block of its dimensions a program."""
    span, head = tl.program_id(0), tl.program_id(1)
    p, s, i = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S), tl.arange(0, L)
    line = tl.load(lines + span).to(tl.int64)
    own = (line * H + head) * P * S + p[:, None] * S + s[None, :]
    is_own = (p < P)[:, None] & (s < S)[None, :]
    is_old = is_own & (s < tl.where(tl.load(fresh + span) == 0, S, 0))[None, :]
    h = tl.load(state + own, mask=is_old, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skip, bias = tl.load(d + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    group = head // PER_GROUP
    for piece in range(tl.load(piece_ptr + span), tl.load(piece_ptr + span + 1)):
        first, end = tl.load(row_ptr + piece).to(tl.int64), tl.load(row_ptr + piece + 1).to(tl.int64)
        rows = first + i
        is_row = rows < end
        step = softplus(tl.load(dt + rows * dt_stride + head, mask=is_row, other=0.0).to(tl.float32) + bias)
        step = tl.where(is_row, tl.minimum(tl.maximum(step, low), high), 0.0)
        total = tl.cumsum(step * rate, 0)
        last = tl.sum(step * rate, 0)
        bc_mask = is_row[:, None] & (s < S)[None, :]
        b_rows = tl.load(b + rows[:, None] * b_stride + group * S + s[None, :], mask=bc_mask, other=0.0)
        c_rows = tl.load(c + rows[:, None] * c_stride + group * S + s[None, :], mask=bc_mask, other=0.0)
        x_mask = is_row[:, None] & (p < P)[None, :]
        x_rows = tl.load(x + rows[:, None] * x_stride + head * P + p[None, :], mask=x_mask, other=0.0)
        sees = i[:, None] >= i[None, :]
        falls = tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0)) * step[None, :]
        within = tl.where(sees, tl.dot(c_rows, tl.trans(b_rows), input_precision=PRECISION) * falls, 0.0)
        y = tl.dot(within.to(x_rows.dtype), x_rows, input_precision=PRECISION)
        y += tl.dot(c_rows, tl.trans(h).to(c_rows.dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
        y += skip * x_rows.to(tl.float32)
        at = out + rows[:, None] * (H * P) + head * P + p[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=x_mask)
        weighted = x_rows.to(tl.float32) * (step * tl.exp(last - total))[:, None]
        h = h * tl.exp(last) + tl.dot(tl.trans(weighted.to(x_rows.dtype)), b_rows, input_precision=PRECISION)
        target = tl.load(keep + piece).to(tl.int64)
        if target >= 0:
            tl.store(state + (own + (target - line) * H * P * S), h, mask=is_own)
    tl.store(state + own, h, mask=is_own)


@triton.jit  # type: ignore[untyped-decorator]
def scan_rows(  # type: ignore[no-untyped-def]
    x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, a_log, d, dt_bias, state, out, lines, fresh, low, high,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One row, which is a span, head and block of its dimensions a program."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, s = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    line, group = tl.load(lines + row).to(tl.int64), head // PER_GROUP
    own = state + (line * H + head) * P * S + p[:, None] * S + s[None, :]
    is_own = (p < P)[:, None] & (s < S)[None, :]
    is_old = is_own & (s < tl.where(tl.load(fresh + row) == 0, S, 0))[None, :]
    h = tl.load(own, mask=is_old, other=0.0).to(tl.float32)
    step = softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32))
    step = tl.minimum(tl.maximum(step, low), high)
    b_row = tl.load(b + row * b_stride + group * S + s, mask=s < S, other=0.0).to(tl.float32)
    c_row = tl.load(c + row * c_stride + group * S + s, mask=s < S, other=0.0).to(tl.float32)
    x_row = tl.load(x + row * x_stride + head * P + p, mask=p < P, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    h = h * tl.exp(step * rate) + (step * x_row)[:, None] * b_row[None, :]
    y = tl.sum(h * c_row[None, :], 1) + tl.load(d + head).to(tl.float32) * x_row
    tl.store(own, h, mask=is_own)
    tl.store(out + row * (H * P) + head * P + p, y.to(out.dtype.element_ty), mask=p < P)
