"""Recurrences token after token in Triton, for rows that are alone: a program has a part of a head's state in registers
from a span's first row to its last. It asks for a row's numbers while it computes the row before.

Invariant: whether spans are single rows, where pieces end, and at which address rows begin, is data and not compiled
in, so that one binary computes every token of a model.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.state.triton.ssm import softplus

SPANS = ["out", "lines", "fresh", "piece_ptr", "row_ptr", "keep"]
"""And what each reads of rows: arguments whose alignment depends on where a step's rows begin."""


@triton.jit
def _pieces(piece_ptr, span, single):  # type: ignore[no-untyped-def]
    """Numbers of a span's first piece, and of the one behind its last."""
    at = span * (1 - single)
    first, end = tl.load(piece_ptr + at), tl.load(piece_ptr + at + 1 - single)
    return tl.where(single != 0, span, first), tl.where(single != 0, span + 1, end)


@triton.jit
def _rows(row_ptr, keep, piece, single):  # type: ignore[no-untyped-def]
    """A piece's first row, the one behind its last, and the line that keeps the state behind it, or -1."""
    at = piece * (1 - single)
    first, end, target = tl.load(row_ptr + at), tl.load(row_ptr + at + 1 - single), tl.load(keep + at)
    first, end = tl.where(single != 0, piece, first), tl.where(single != 0, piece + 1, end)
    return first.to(tl.int64), end.to(tl.int64), tl.where(single != 0, -1, target).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _ssm_row(  # type: ignore[no-untyped-def]
    x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, row, head, group, p, s, P: tl.constexpr, S: tl.constexpr
):
    """What the recurrence reads of a row."""
    x_row = tl.load(x + row * x_stride + head * P + p, mask=p < P, other=0.0)
    b_row = tl.load(b + row * b_stride + group * S + s, mask=s < S, other=0.0)
    c_row = tl.load(c + row * c_stride + group * S + s, mask=s < S, other=0.0)
    return x_row, tl.load(dt + row * dt_stride + head), b_row, c_row


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["single"], do_not_specialize_on_alignment=[*SPANS, "x", "dt", "b", "c"]
)
def scan_ssm(  # type: ignore[no-untyped-def]
    x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, a_log, d, dt_bias, state, out,
    lines, fresh, piece_ptr, row_ptr, keep, single, low, high,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One span, head and block of its dimensions a program."""
    span, head = tl.program_id(0), tl.program_id(1)
    p, s = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    line, group = tl.load(lines + span).to(tl.int64), head // PER_GROUP
    own = (line * H + head) * P * S + p[:, None] * S + s[None, :]
    is_own = (p < P)[:, None] & (s < S)[None, :]
    is_old = is_own & (s < tl.where(tl.load(fresh + span) == 0, S, 0))[None, :]
    h = tl.load(state + own, mask=is_old, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skip, bias = tl.load(d + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    first_piece, end_piece = _pieces(piece_ptr, span, single)
    for piece in range(first_piece, end_piece):
        first, end, target = _rows(row_ptr, keep, piece, single)
        x_next, dt_next, b_next, c_next = _ssm_row(
            x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, first, head, group, p, s, P, S
        )
        for row in range(first, end):
            step = tl.minimum(tl.maximum(softplus(dt_next.to(tl.float32) + bias), low), high)
            x_row, b_row, c_row = x_next.to(tl.float32), b_next.to(tl.float32), c_next.to(tl.float32)
            ahead = tl.minimum(row + 1, end - 1)
            x_next, dt_next, b_next, c_next = _ssm_row(
                x, x_stride, dt, dt_stride, b, b_stride, c, c_stride, ahead, head, group, p, s, P, S
            )
            h = h * tl.exp(step * rate) + (step * x_row)[:, None] * b_row[None, :]
            y = tl.sum(h * c_row[None, :], 1) + skip * x_row
            tl.store(out + row * (H * P) + head * P + p, y.to(out.dtype.element_ty), mask=p < P)
        if target >= 0:
            tl.store(state + (own + (target - line) * H * P * S), h, mask=is_own)
    tl.store(state + own, h, mask=is_own)


@triton.jit  # type: ignore[untyped-decorator]
def _delta_row(  # type: ignore[no-untyped-def]
    q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride, row, head, of_key, d, e, D: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """What the rule reads of a row."""
    query = tl.load(q + row * q_stride + of_key, mask=d < D, other=0.0)
    key = tl.load(k + row * k_stride + of_key, mask=d < D, other=0.0)
    value = tl.load(v + row * v_stride + head * E + e, mask=e < E, other=0.0)
    return query, key, value, tl.load(a + row * a_stride + head), tl.load(b + row * b_stride + head)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["single"], do_not_specialize_on_alignment=[*SPANS, "q", "k", "v", "a", "b"]
)
def scan_delta(  # type: ignore[no-untyped-def]
    q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride, a_log, dt_bias, state, out,
    lines, fresh, piece_ptr, row_ptr, keep, single, scale,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PER_KEY: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One span, head and block of its values a program."""
    span, head = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    line = tl.load(lines + span).to(tl.int64)
    own = (line * H + head) * D * E + d[:, None] * E + e[None, :]
    is_own = (d < D)[:, None] & (e < E)[None, :]
    is_old = is_own & (e < tl.where(tl.load(fresh + span) == 0, E, 0))[None, :]
    s = tl.load(state + own, mask=is_old, other=0.0).to(tl.float32)
    of_key = (head // PER_KEY) * D + d
    rate, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    first_piece, end_piece = _pieces(piece_ptr, span, single)
    for piece in range(first_piece, end_piece):
        first, end, target = _rows(row_ptr, keep, piece, single)
        q_next, k_next, v_next, a_next, b_next = _delta_row(
            q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride, first, head, of_key, d, e, D, E
        )
        for row in range(first, end):
            query, key, value = q_next.to(tl.float32), k_next.to(tl.float32), v_next.to(tl.float32)
            step, beta = softplus(a_next.to(tl.float32) + bias), tl.sigmoid(b_next.to(tl.float32))
            ahead = tl.minimum(row + 1, end - 1)
            q_next, k_next, v_next, a_next, b_next = _delta_row(
                q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride, ahead, head, of_key, d, e, D, E
            )
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            s *= tl.exp(step * rate)
            error = (value - tl.sum(s * key[:, None], 0)) * beta
            s += key[:, None] * error[None, :]
            y = tl.sum(s * query[:, None], 0)
            tl.store(out + row * (H * E) + head * E + e, y.to(out.dtype.element_ty), mask=e < E)
        if target >= 0:
            tl.store(state + (own + (target - line) * H * D * E), s, mask=is_own)
    tl.store(state + own, s, mask=is_own)
