"""The gated delta rule in Triton, in the WY form (Yang et al. 2024): what the keys of a piece do to one another is
solved for all pieces side by side; then a program takes a span's pieces one after the other, its state in registers.

Keys and queries are multiplied as they come, and products are divided by their lengths. The state of a program is
transposed, [values, keys]: so it is the left side of each product and needs no shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.state.triton.ssm import softplus


@triton.jit
def _lengths(x):  # type: ignore[no-untyped-def]
    """1 / length of rows, float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _decays(a, a_stride, a_log, dt_bias, head, rows, is_row):  # type: ignore[no-untyped-def]
    """Logarithms of what a state keeps at each row; 0 behind the last."""
    bias, rate = tl.load(dt_bias + head).to(tl.float32), -tl.exp(tl.load(a_log + head).to(tl.float32))
    step = softplus(tl.load(a + rows * a_stride + head, mask=is_row, other=0.0).to(tl.float32) + bias)
    return tl.where(is_row, step * rate, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(lower, L: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1 + lower)^-1 for a strictly lower triangle [L, L], L = 4 BLOCK.

    Blocks on the diagonal by substitution, row k of all of them at once; then two blocks at a time are joined: of
    [[A, 0], [C, B]] the inverse is [[A', 0], [-B' C A', B']]. A series over all rows would have terms that grow with
    binomials and cancel.
    """
    N: tl.constexpr = L // BLOCK
    n = tl.arange(0, N)
    i = tl.arange(0, BLOCK)
    is_near = n[:, None, None, None] == n[None, None, :, None]
    near = tl.sum(tl.where(is_near, tl.reshape(lower, (N, BLOCK, N, BLOCK)), 0.0), 2)
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :]
    solved = tl.broadcast_to(one, (N, BLOCK, BLOCK))
    for k in range(1, BLOCK):
        is_k = (i == k)[None, :, None]
        row = tl.sum(tl.where(is_k, near, 0.0), 1)
        change = tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(is_k, one - change[:, None, :], solved)
    x = tl.reshape(tl.where(is_near, solved[:, :, None, :], 0.0), (L, L))
    at = tl.arange(0, L)
    pair = (at // (2 * BLOCK))[:, None] == (at // (2 * BLOCK))[None, :]
    is_below = pair & ((at // BLOCK)[:, None] != (at // BLOCK)[None, :])
    below = tl.dot(tl.where(is_below, lower, 0.0), x, input_precision=PRECISION)
    x -= tl.dot(x, below, input_precision=PRECISION)
    below = tl.dot(tl.where(pair, 0.0, lower), x, input_precision=PRECISION)
    return x - tl.dot(x, below, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def solve_pieces(  # type: ignore[no-untyped-def]
    q, q_stride, k, k_stride, a, a_stride, b, b_stride, a_log, dt_bias, solved, seen, scales, row_ptr, scale,
    H: tl.constexpr, D: tl.constexpr, PER_KEY: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One piece and head a program. What a row writes is a sum of errors of rows, weighted by `solved` [L, L]; what its
    query sees of what rows write is weighted by `seen` [L, L]. Scales [4, L]: of what its key and its query see of the
    state, of its key in the state behind the piece, and, one number, of the state. Behind a piece's rows both are
    zero."""
    piece, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(row_ptr + piece).to(tl.int64), tl.load(row_ptr + piece + 1).to(tl.int64)
    i, d = tl.arange(0, L), tl.arange(0, BLOCK_D)
    rows = first + i
    is_row = rows < end
    mask, of_key = is_row[:, None] & (d < D)[None, :], (head // PER_KEY) * D + d[None, :]
    keys = tl.load(k + rows[:, None] * k_stride + of_key, mask=mask, other=0.0)
    queries = tl.load(q + rows[:, None] * q_stride + of_key, mask=mask, other=0.0)
    decays = _decays(a, a_stride, a_log, dt_bias, head, rows, is_row)
    beta = tl.sigmoid(tl.load(b + rows * b_stride + head, mask=is_row, other=0.0).to(tl.float32))
    beta = tl.where(is_row, beta, 0.0)
    total, last = tl.cumsum(decays, 0), tl.sum(decays, 0)
    of_keys, of_queries = _lengths(keys), _lengths(queries) * scale
    at = (piece * H + head).to(tl.int64)
    scales += at * 4 * L
    tl.store(scales + i, of_keys * tl.exp(total))
    tl.store(scales + L + i, of_queries * tl.exp(total))
    tl.store(scales + 2 * L + i, of_keys * tl.exp(last - total))
    tl.store(scales + 3 * L, tl.exp(last))
    sees = i[:, None] >= i[None, :]
    falls = tl.where(sees, tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0)) * of_keys[None, :], 0.0)
    alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    lower = tl.where(i[:, None] > i[None, :], alike * falls * (beta * of_keys)[:, None], 0.0)
    to = at * L * L + i[:, None] * L + i[None, :]
    within = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * falls * of_queries[:, None]
    tl.store(seen + to, within.to(seen.dtype.element_ty))
    weights = _inverse(lower, L, BLOCK, EXACT) * beta[None, :]
    tl.store(solved + to, weights.to(solved.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def scan_pieces(  # type: ignore[no-untyped-def]
    q, q_stride, k, k_stride, v, v_stride, solved, seen, scales, state, out,
    lines, fresh, piece_ptr, row_ptr, keep,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PER_KEY: tl.constexpr, L: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One span, head and block of its values a program. What rows write and what comes out is transposed, as the state
    is."""
    span, head = tl.program_id(1), tl.program_id(0) % H
    i, d, e = tl.arange(0, L), tl.arange(0, BLOCK_D), (tl.program_id(0) // H) * BLOCK_E + tl.arange(0, BLOCK_E)
    line = tl.load(lines + span).to(tl.int64)
    own = (line * H + head) * D * E + d[None, :] * E + e[:, None]
    is_own = (d < D)[None, :] & (e < E)[:, None]
    is_old = is_own & (e < tl.where(tl.load(fresh + span) == 0, E, 0))[:, None]
    s = tl.load(state + own, mask=is_old, other=0.0).to(tl.float32)
    kind = k.dtype.element_ty
    of_key = (head // PER_KEY) * D + d[None, :]
    for piece in tl.range(tl.load(piece_ptr + span), tl.load(piece_ptr + span + 1), num_stages=STAGES):
        first, end = tl.load(row_ptr + piece).to(tl.int64), tl.load(row_ptr + piece + 1).to(tl.int64)
        rows = first + i
        is_row = rows < end
        mask, v_mask = is_row[:, None] & (d < D)[None, :], is_row[None, :] & (e < E)[:, None]
        keys = tl.load(k + rows[:, None] * k_stride + of_key, mask=mask, other=0.0)
        values = tl.load(v + rows[None, :] * v_stride + head * E + e[:, None], mask=v_mask, other=0.0)
        queries = tl.load(q + rows[:, None] * q_stride + of_key, mask=mask, other=0.0)
        at = (piece * H + head).to(tl.int64)
        weights = tl.load(solved + at * L * L + i[:, None] * L + i[None, :])
        within = tl.load(seen + at * L * L + i[:, None] * L + i[None, :])
        key_scale, query_scale = tl.load(scales + at * 4 * L + i), tl.load(scales + at * 4 * L + L + i)
        left_scale, state_scale = tl.load(scales + at * 4 * L + 2 * L + i), tl.load(scales + at * 4 * L + 3 * L)
        known = tl.dot(s.to(kind), tl.trans(keys), input_precision=PRECISION)
        errors = (values.to(tl.float32) - known * key_scale[None, :]).to(kind)
        wrote = tl.dot(errors, tl.trans(weights), input_precision=PRECISION)
        y = tl.dot(s.to(kind), tl.trans(queries), input_precision=PRECISION) * query_scale[None, :]
        s = tl.dot((wrote * left_scale[None, :]).to(kind), keys, s * state_scale, input_precision=PRECISION)
        y = tl.dot(wrote.to(kind), tl.trans(within), y, input_precision=PRECISION)
        to = out + rows[None, :] * (H * E) + head * E + e[:, None]
        tl.store(to, y.to(out.dtype.element_ty), mask=v_mask)
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
    """One row, which is a span, head and block of its values a program. All is asked for before anything is waited
    for, and the state, which nobody reads again soon, is the first to leave the L2 cache."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    line, is_fresh = tl.load(lines + row).to(tl.int64), tl.load(fresh + row)
    of_key = (head // PER_KEY) * D + d
    query = tl.load(q + row * q_stride + of_key, mask=d < D, other=0.0).to(tl.float32)
    key = tl.load(k + row * k_stride + of_key, mask=d < D, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_stride + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    a_row, b_row = tl.load(a + row * a_stride + head), tl.load(b + row * b_stride + head)
    rate, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    own = state + (line * H + head) * D * E + d[:, None] * E + e[None, :]
    is_own = (d < D)[:, None] & (e < E)[None, :]
    is_old = is_own & (e < tl.where(is_fresh == 0, E, 0))[None, :]
    s = tl.load(own, mask=is_old, other=0.0, eviction_policy="evict_first").to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    step, beta = softplus(a_row.to(tl.float32) + bias), tl.sigmoid(b_row.to(tl.float32))
    s *= tl.exp(step * rate)
    error = (value - tl.sum(s * key[:, None], 0)) * beta
    s += key[:, None] * error[None, :]
    tl.store(own, s, mask=is_own, eviction_policy="evict_first")
    y = tl.sum(s * query[:, None], 0)
    tl.store(out + row * (H * E) + head * E + e, y.to(out.dtype.element_ty), mask=e < E)
