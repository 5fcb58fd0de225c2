"""The gated delta rule in Triton, in the WY form (Yang et al. 2024): what the keys of a piece do to one another is
solved for all pieces side by side; then a program takes a span's pieces one after the other, its state in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.state.triton.ssm import softplus


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    """Rows over their lengths, float32."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _decays(a, a_stride, a_log, dt_bias, head, rows, is_row):  # type: ignore[no-untyped-def]
    """Logarithms of what a state keeps at each row; 0 behind the last."""
    bias, rate = tl.load(dt_bias + head).to(tl.float32), -tl.exp(tl.load(a_log + head).to(tl.float32))
    step = softplus(tl.load(a + rows * a_stride + head, mask=is_row, other=0.0).to(tl.float32) + bias)
    return tl.where(is_row, step * rate, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(lower, i, L: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1 + lower)^-1 for a strictly lower triangle [L, L].

    Blocks on the diagonal by substitution, row k of all of them at once; what is below them is nilpotent in L / BLOCK
    = 4 steps. A series over all rows would have terms that grow with binomials and cancel.
    """
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    is_near = (i // BLOCK)[:, None] == (i // BLOCK)[None, :]
    near, far = tl.where(is_near, lower, 0.0), tl.where(is_near, 0.0, lower)
    solved = one
    for k in range(1, BLOCK):
        change = tl.dot(near, solved, input_precision=PRECISION)
        solved = tl.where((i % BLOCK == k)[:, None], one - change, solved)
    x = tl.dot(solved, far, input_precision=PRECISION)
    squared = tl.dot(x, x, input_precision=PRECISION)
    series = one - x + squared - tl.dot(squared, x, input_precision=PRECISION)
    return tl.dot(series, solved, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def solve_pieces(  # type: ignore[no-untyped-def]
    k, k_stride, v, v_stride, a, a_stride, b, b_stride, a_log, dt_bias, new, known, row_ptr,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PER_KEY: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One piece and head a program: the values that its rows write were the state zero (new), and what each row takes
    off for what the state knows (known)."""
    piece, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(row_ptr + piece).to(tl.int64), tl.load(row_ptr + piece + 1).to(tl.int64)
    i, d, e = tl.arange(0, L), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    rows = first + i
    is_row = rows < end
    keys_at = k + rows[:, None] * k_stride + (head // PER_KEY) * D + d[None, :]
    keys = _unit(tl.load(keys_at, mask=is_row[:, None] & (d < D)[None, :], other=0.0))
    total = tl.cumsum(_decays(a, a_stride, a_log, dt_bias, head, rows, is_row), 0)
    beta = tl.sigmoid(tl.load(b + rows * b_stride + head, mask=is_row, other=0.0).to(tl.float32))
    beta = tl.where(is_row, beta, 0.0)
    kind = k.dtype.element_ty
    is_before = i[:, None] > i[None, :]
    falls = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0))
    alike = tl.dot(keys.to(kind), tl.trans(keys.to(kind)), input_precision=PRECISION)
    lower = tl.where(is_before, alike * falls * beta[:, None], 0.0)
    solved = _inverse(lower, i, L, BLOCK, EXACT).to(kind)
    weighted = (keys * (beta * tl.exp(total))[:, None]).to(kind)
    took = tl.dot(solved, weighted, input_precision=PRECISION)
    known_at = known + rows[:, None] * (H * D) + head * D + d[None, :]
    tl.store(known_at, took.to(kind), mask=is_row[:, None] & (d < D)[None, :])
    v_mask = is_row[:, None] & (e < E)[None, :]
    values = tl.load(v + rows[:, None] * v_stride + head * E + e[None, :], mask=v_mask, other=0.0)
    wrote = tl.dot(solved, (values.to(tl.float32) * beta[:, None]).to(kind), input_precision=PRECISION)
    tl.store(new + rows[:, None] * (H * E) + head * E + e[None, :], wrote.to(kind), mask=v_mask)


@triton.jit  # type: ignore[untyped-decorator]
def scan_pieces(  # type: ignore[no-untyped-def]
    q, q_stride, k, k_stride, a, a_stride, a_log, dt_bias, new, known, state, out,
    lines, fresh, piece_ptr, row_ptr, keep, scale,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PER_KEY: tl.constexpr, L: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span, head and block of its values a program."""
    span, head = tl.program_id(0), tl.program_id(1)
    i, d, e = tl.arange(0, L), tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    line = tl.load(lines + span).to(tl.int64)
    own = (line * H + head) * D * E + d[:, None] * E + e[None, :]
    is_own = (d < D)[:, None] & (e < E)[None, :]
    is_old = is_own & (e < tl.where(tl.load(fresh + span) == 0, E, 0))[None, :]
    s = tl.load(state + own, mask=is_old, other=0.0).to(tl.float32)
    kind = k.dtype.element_ty
    for piece in range(tl.load(piece_ptr + span), tl.load(piece_ptr + span + 1)):
        first, end = tl.load(row_ptr + piece).to(tl.int64), tl.load(row_ptr + piece + 1).to(tl.int64)
        rows = first + i
        is_row = rows < end
        d_mask, e_mask = is_row[:, None] & (d < D)[None, :], is_row[:, None] & (e < E)[None, :]
        of_key = (head // PER_KEY) * D + d[None, :]
        queries = _unit(tl.load(q + rows[:, None] * q_stride + of_key, mask=d_mask, other=0.0)) * scale
        keys = _unit(tl.load(k + rows[:, None] * k_stride + of_key, mask=d_mask, other=0.0))
        decays = _decays(a, a_stride, a_log, dt_bias, head, rows, is_row)
        total, last = tl.cumsum(decays, 0), tl.sum(decays, 0)
        took = tl.load(known + rows[:, None] * (H * D) + head * D + d[None, :], mask=d_mask, other=0.0)
        wrote = tl.load(new + rows[:, None] * (H * E) + head * E + e[None, :], mask=e_mask, other=0.0).to(tl.float32)
        wrote -= tl.dot(took, s.to(kind), input_precision=PRECISION)
        sees = i[:, None] >= i[None, :]
        falls = tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0))
        within = tl.dot(queries.to(kind), tl.trans(keys.to(kind)), input_precision=PRECISION)
        within = tl.where(sees, within * falls, 0.0).to(kind)
        y = tl.dot((queries * tl.exp(total)[:, None]).to(kind), s.to(kind), input_precision=PRECISION)
        y += tl.dot(within, wrote.to(kind), input_precision=PRECISION)
        at = out + rows[:, None] * (H * E) + head * E + e[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=e_mask)
        left = (keys * tl.exp(last - total)[:, None]).to(kind)
        s = s * tl.exp(last) + tl.dot(tl.trans(left), wrote.to(kind), input_precision=PRECISION)
        target = tl.load(keep + piece).to(tl.int64)
        if target >= 0:
            tl.store(state + (own + (target - line) * H * D * E), s, mask=is_own)
    tl.store(state + own, s, mask=is_own)


@triton.jit  # type: ignore[untyped-decorator]
def scan_rows(  # type: ignore[no-untyped-def]
    q, q_stride, k, k_stride, v, v_stride, a, a_stride, b, b_stride, a_log, dt_bias, state, out, lines, fresh, scale,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PER_KEY: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One row, which is a span, head and block of its values a program."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    line = tl.load(lines + row).to(tl.int64)
    own = state + (line * H + head) * D * E + d[:, None] * E + e[None, :]
    is_own = (d < D)[:, None] & (e < E)[None, :]
    is_old = is_own & (e < tl.where(tl.load(fresh + row) == 0, E, 0))[None, :]
    s = tl.load(own, mask=is_old, other=0.0).to(tl.float32)
    of_key = (head // PER_KEY) * D + d
    query = tl.load(q + row * q_stride + of_key, mask=d < D, other=0.0).to(tl.float32)
    key = tl.load(k + row * k_stride + of_key, mask=d < D, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    step = softplus(tl.load(a + row * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32))
    beta = tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    value = tl.load(v + row * v_stride + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    s *= tl.exp(step * rate)
    error = (value - tl.sum(s * key[:, None], 0)) * beta
    s += key[:, None] * error[None, :]
    tl.store(own, s, mask=is_own)
    y = tl.sum(s * query[:, None], 0)
    tl.store(out + row * (H * E) + head * E + e, y.to(out.dtype.element_ty), mask=e < E)
