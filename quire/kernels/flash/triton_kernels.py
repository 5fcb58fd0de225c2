"""The Triton kernels of dense attention: forward, and backward in three (delta; keys and values; queries).

Flash attention (Dao et al. 2022, algorithms 2 and 4; Dao 2023, section 3.2, for the order of the loops). Every gradient
has one writer: no atomics, the same bits in every run. Only blocks on an edge of what is visible are masked.
Strides are in elements, (sequence, row, head); ragged sequences have sequence strides of 0 and rows of their own.
Hooks as in attention/triton/hooks.py (a kernel's own argument cannot be called `params`: the launcher of @triton.jit
shadows that name); dead lanes show them the coordinates of the last row or key.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NUMBERS = ["q_len", "kv_len", "n_blocks", "n_heads", "scale", "window", "n_first"]
"""Arguments whose values are not compiled in."""


@triton.jit
def _address(base, seq, row, head, seq_stride, stride, head_stride):  # type: ignore[no-untyped-def]
    """Of element 0; 64 bits."""
    return base + seq.to(tl.int64) * seq_stride + row.to(tl.int64) * stride + head.to(tl.int64) * head_stride


@triton.jit  # type: ignore[untyped-decorator]
def _sequence(seq, indptr, longest, RAGGED: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row of a sequence inside its tensor, and its length."""
    if RAGGED:
        first = tl.load(indptr + seq)
        return first, tl.load(indptr + seq + 1) - first
    else:
        return seq * 0, longest


@triton.jit  # type: ignore[untyped-decorator]
def _load(at, first, n_rows, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CHECKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows first .. first + ROWS of a matrix; zeros beyond n_rows (if CHECKED) and beyond D."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    here = at + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    if CHECKED:
        x = tl.load(here, mask=(first + rows < n_rows)[:, None] & (dims < D)[None, :], other=0.0)
    elif D < BLOCK_D:
        x = tl.load(here, mask=(dims < D)[None, :], other=0.0)
    else:
        x = tl.load(here)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _store(at, x, first, n_rows, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    here = at + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + dims[None, :]
    tl.store(here, x.to(at.dtype.element_ty), mask=(first + rows < n_rows)[:, None] & (dims < D)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _load_lse(at, rows, n_rows, CHECKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """In base 2; of rows that see nothing, or are none, +inf, so that all their probabilities are 0."""
    if CHECKED:
        lse = tl.load(at + rows, mask=rows < n_rows, other=float("-inf"))
    else:
        lse = tl.load(at + rows)
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit  # type: ignore[untyped-decorator]
def _transformed(x, rows, k_pos, site, shape, parameters, HOOK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A hook of logits x."""
    q_len, kv_len = shape[0], shape[1]
    rows, k_pos = tl.minimum(rows, q_len - 1), tl.minimum(k_pos, kv_len - 1)
    return HOOK(x, site[0] + rows, rows + (kv_len - q_len), k_pos, site[1], site[2], parameters)


@triton.jit  # type: ignore[untyped-decorator]
def _logits(  # type: ignore[no-untyped-def]
    s, rows, k_pos, scale, site, shape, parameters,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Logits from s = q k, still without the scale if there is no transform; hidden ones -inf."""
    q_len, kv_len, window, n_first = shape[0], shape[1], shape[2], shape[3]
    q_pos = rows + (kv_len - q_len)
    if LOGITS is not None:
        s = _transformed(s * scale, rows, k_pos, site, shape, parameters, LOGITS)
    if MASKED:
        seen = (rows < q_len) & (k_pos < kv_len)
        if CAUSAL:
            seen = seen & (k_pos <= q_pos)
        if WINDOWED:
            seen = seen & ((k_pos > q_pos - window) | (k_pos < n_first))
        s = tl.where(seen, s, float("-inf"))
    if MASK is not None:
        live_row, live_key = tl.minimum(rows, q_len - 1), tl.minimum(k_pos, kv_len - 1)
        seen = MASK(site[0] + live_row, live_row + (kv_len - q_len), live_key, site[1], site[2], parameters)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    s, logits, lse, d_weights, delta, rows, k_pos, scale, factor, site, shape, parameters,
    SLOPE: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """(probabilities, gradients of scale * q k) of a block; lse in base 2. CHECKED: some logits may be -inf."""
    weights = tl.exp2(logits * factor - lse)
    d_logits = weights * (d_weights - delta)
    if SLOPE is not None:
        d_logits = d_logits * _transformed(s * scale, rows, k_pos, site, shape, parameters, SLOPE)
    if CHECKED:
        hidden = logits == float("-inf")
        weights, d_logits = tl.where(hidden, 0.0, weights), tl.where(hidden, 0.0, d_logits)
    return weights, d_logits


@triton.jit  # type: ignore[untyped-decorator]
def _seen_keys(first, n_rows, shape, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys that rows first .. first + n_rows see: (0, end of the early ones, begin, whole, whole, whole_end, whole_end,
    end), four ranges of which the third needs no mask. Every range begins at a multiple of BLOCK, or is empty.
    """
    q_len, kv_len, window, n_first = shape[0], shape[1], shape[2], shape[3]
    shift = kv_len - q_len
    low, high = first + shift, tl.minimum(first + n_rows, q_len) - 1 + shift
    early_end, begin, whole = first * 0, first * 0, first * 0
    whole_end, end = kv_len // BLOCK * BLOCK, kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, tl.maximum(high + 1, 0))
        whole_end = tl.minimum(kv_len, tl.maximum(low + 1, 0)) // BLOCK * BLOCK
    if WINDOWED:
        begin = tl.maximum(low - window + 1, 0) // BLOCK * BLOCK
        end = tl.maximum(end, begin)
        early_end = tl.minimum(tl.minimum(n_first, begin), end)
        whole = tl.minimum(tl.cdiv(tl.maximum(high - window + 1, 0), BLOCK) * BLOCK, end)
        whole_end = tl.maximum(whole, whole_end)
    return early_end * 0, early_end, begin, whole, whole, whole_end, whole_end, end


@triton.jit  # type: ignore[untyped-decorator]
def _seen_rows(first, n_keys, shape, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows that see keys first .. first + n_keys: (begin, whole, whole, whole_end, whole_end, end), three ranges of
    which the second needs no mask.
    """
    q_len, kv_len, window, n_first = shape[0], shape[1], shape[2], shape[3]
    shift = kv_len - q_len
    last = tl.minimum(first + n_keys, kv_len) - 1
    begin, whole = first * 0, first * 0
    whole_end, end = q_len // BLOCK * BLOCK, q_len
    if CAUSAL:
        begin = tl.maximum(first - shift, 0) // BLOCK * BLOCK
        whole = tl.cdiv(tl.maximum(last - shift, 0), BLOCK) * BLOCK
    if WINDOWED:
        reach = tl.minimum(q_len, tl.maximum(last + window - shift, 0))
        end = tl.where(first >= n_first, reach, q_len)
        all_reach = tl.minimum(whole_end, tl.maximum(first + window - shift, 0) // BLOCK * BLOCK)
        whole_end = tl.where(last >= n_first, all_reach, whole_end)
    end = tl.maximum(end, begin)
    whole = tl.minimum(whole, end)
    whole_end = tl.maximum(whole, whole_end)
    return begin, whole, whole, whole_end, whole_end, end


@triton.jit  # type: ignore[untyped-decorator]
def _fold_keys(  # type: ignore[no-untyped-def]
    acc, total, top, queries, k, v, k_stride, v_stride, begin, end, rows, scale, factor, site, shape, parameters,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bring keys begin .. end into the running softmax: acc, total and, in base 2, top."""
    for first in tl.range(begin, end, BLOCK_N):
        keys = _load(k, first, shape[1], k_stride, D, BLOCK_N, BLOCK_D, MASKED)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        k_pos = (first + tl.arange(0, BLOCK_N))[None, :]
        s = _logits(s, rows, k_pos, scale, site, shape, parameters, CAUSAL, WINDOWED, LOGITS, MASK, MASKED)
        new_top = tl.maximum(top, tl.max(s, 1) * factor)
        base = new_top
        if MASKED or LOGITS is not None or MASK is not None:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(s * factor - base[:, None])
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(weights, 1)
        values = _load(v, first, shape[1], v_stride, D, BLOCK_N, BLOCK_D, MASKED)
        acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def forward(  # type: ignore[no-untyped-def]
    q, q_seq, q_stride, q_head, k, k_seq, k_stride, k_head, v, v_seq, v_stride, v_head, q_indptr, kv_indptr,
    lse, lse_seq, lse_head, out, out_seq, out_stride, q_len, kv_len, n_blocks, n_heads, scale, window, n_first,
    parameters,
    GROUP: tl.constexpr, RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LOGITS: tl.constexpr,
    MASK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head of one sequence; of a head, the longest first."""
    first = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    head, seq = tl.program_id(0) // n_blocks % n_heads, tl.program_id(0) // n_blocks // n_heads
    kv_head, q_row0 = head // GROUP, seq * q_len
    q_row, q_len = _sequence(seq, q_indptr, q_len, RAGGED)
    kv_row, kv_len = _sequence(seq, kv_indptr, kv_len, RAGGED)
    if first >= q_len:
        return
    site, shape = (q_row if RAGGED else q_row0, head, kv_head), (q_len, kv_len, window, n_first)
    k = _address(k, seq, kv_row, kv_head, k_seq, k_stride, k_head)
    v = _address(v, seq, kv_row, kv_head, v_seq, v_stride, v_head)
    rows = first + tl.arange(0, BLOCK_M)
    queries = _load(
        _address(q, seq, q_row, head, q_seq, q_stride, q_head), first, q_len, q_stride, D, BLOCK_M, BLOCK_D, True
    )
    factor = LOG2E * 1.0 if LOGITS is not None else scale * LOG2E
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    bounds = _seen_keys(first, BLOCK_M, shape, CAUSAL, WINDOWED, BLOCK_N)
    for part in tl.static_range(0 if WINDOWED else 2, 4):
        acc, total, top = _fold_keys(
            acc, total, top, queries, k, v, k_stride, v_stride, bounds[2 * part], bounds[2 * part + 1], rows[:, None],
            scale, factor, site, shape, parameters, CAUSAL, WINDOWED, LOGITS, MASK, part != 2, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    _store(_address(out, seq, q_row, head, out_seq, out_stride, D), acc, first, q_len, out_stride, D, BLOCK_M, BLOCK_D)
    log_sum = tl.where(blind, float("-inf"), (top + tl.log2(tl.where(blind, 1.0, total))) / LOG2E)
    tl.store(_address(lse, seq, q_row, head, lse_seq, 1, lse_head) + rows, log_sum, mask=rows < q_len)


@triton.jit(do_not_specialize=["q_len", "n_blocks", "n_heads"])  # type: ignore[untyped-decorator]
def delta(  # type: ignore[no-untyped-def]
    out, out_seq, out_stride, d_out, d_out_seq, d_out_stride, d_out_head, d_lse, lse_seq, lse_head, result, q_indptr,
    q_len, n_blocks, n_heads,
    RAGGED: tl.constexpr, HAS_D_LSE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """rowsum(out * d_out) - d_lse: what every probability's gradient of a row has subtracted."""
    first = tl.program_id(0) % n_blocks * BLOCK_M
    head, seq = tl.program_id(0) // n_blocks % n_heads, tl.program_id(0) // n_blocks // n_heads
    row, q_len = _sequence(seq, q_indptr, q_len, RAGGED)
    at = _address(out, seq, row, head, out_seq, out_stride, D)
    d_at = _address(d_out, seq, row, head, d_out_seq, d_out_stride, d_out_head)
    x = _load(at, first, q_len, out_stride, D, BLOCK_M, BLOCK_D, True).to(tl.float32)
    dx = _load(d_at, first, q_len, d_out_stride, D, BLOCK_M, BLOCK_D, True).to(tl.float32)
    rows = first + tl.arange(0, BLOCK_M)
    total = tl.sum(x * dx, 1)
    if HAS_D_LSE:
        total -= tl.load(_address(d_lse, seq, row, head, lse_seq, 1, lse_head) + rows, mask=rows < q_len, other=0.0)
    tl.store(_address(result, seq, row, head, lse_seq, 1, lse_head) + rows, total, mask=rows < q_len)


@triton.jit  # type: ignore[untyped-decorator]
def _fold_rows(  # type: ignore[no-untyped-def]
    dk, dv, keys, values, q, d_out, lse, deltas, q_stride, d_out_stride, begin, end, k_pos, scale, factor, site, shape,
    parameters, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LOGITS: tl.constexpr, SLOPE: tl.constexpr,
    MASK: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add what rows begin .. end of one head give to dk (without the scale) and dv."""
    for first in tl.range(begin, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        queries = _load(q, first, shape[0], q_stride, D, BLOCK_M, BLOCK_D, MASKED)
        s = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        norm = _load_lse(lse, rows, shape[0], MASKED)
        logits = _logits(
            s, rows[None, :], k_pos, scale, site, shape, parameters, CAUSAL, WINDOWED, LOGITS, MASK, MASKED
        )
        d_rows = _load(d_out, first, shape[0], d_out_stride, D, BLOCK_M, BLOCK_D, MASKED)
        less = tl.load(deltas + rows, mask=rows < shape[0], other=0.0)
        d_weights = tl.dot(values, tl.trans(d_rows), input_precision="ieee")
        weights, d_logits = _gradients(
            s, logits, norm[None, :], d_weights, less[None, :], rows[None, :], k_pos, scale, factor, site, shape,
            parameters, SLOPE, MASKED or LOGITS is not None or MASK is not None,
        )  # fmt: skip
        dv = tl.dot(weights.to(d_rows.dtype), d_rows, dv, input_precision="ieee")
        dk = tl.dot(d_logits.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def backward_keys(  # type: ignore[no-untyped-def]
    q, q_seq, q_stride, q_head, k, k_seq, k_stride, k_head, v, v_seq, v_stride, v_head, q_indptr, kv_indptr,
    lse, lse_seq, lse_head, deltas, d_out, d_out_seq, d_out_stride, d_out_head, dk, dv, dkv_seq, dkv_stride,
    q_len, kv_len, n_blocks, n_heads, scale, window, n_first, parameters,
    GROUP: tl.constexpr, RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LOGITS: tl.constexpr,
    SLOPE: tl.constexpr, MASK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one KV head, summed over the query heads of its group. n_heads: KV heads."""
    first = tl.program_id(0) % n_blocks * BLOCK_N
    kv_head, seq = tl.program_id(0) // n_blocks % n_heads, tl.program_id(0) // n_blocks // n_heads
    q_row0 = seq * q_len
    q_row, q_len = _sequence(seq, q_indptr, q_len, RAGGED)
    kv_row, kv_len = _sequence(seq, kv_indptr, kv_len, RAGGED)
    if first >= kv_len:
        return
    shape = (q_len, kv_len, window, n_first)
    k_at = _address(k, seq, kv_row, kv_head, k_seq, k_stride, k_head)
    v_at = _address(v, seq, kv_row, kv_head, v_seq, v_stride, v_head)
    keys = _load(k_at, first, kv_len, k_stride, D, BLOCK_N, BLOCK_D, True)
    values = _load(v_at, first, kv_len, v_stride, D, BLOCK_N, BLOCK_D, True)
    k_pos = (first + tl.arange(0, BLOCK_N))[:, None]
    factor = LOG2E * 1.0 if LOGITS is not None else scale * LOG2E
    sum_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    sum_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    bounds = _seen_rows(first, BLOCK_N, shape, CAUSAL, WINDOWED, BLOCK_M)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        site = (q_row if RAGGED else q_row0, head, kv_head)
        q_at = _address(q, seq, q_row, head, q_seq, q_stride, q_head)
        d_at = _address(d_out, seq, q_row, head, d_out_seq, d_out_stride, d_out_head)
        lse_at = _address(lse, seq, q_row, head, lse_seq, 1, lse_head)
        delta_at = _address(deltas, seq, q_row, head, lse_seq, 1, lse_head)
        for part in tl.static_range(3):
            sum_k, sum_v = _fold_rows(
                sum_k, sum_v, keys, values, q_at, d_at, lse_at, delta_at, q_stride, d_out_stride, bounds[2 * part],
                bounds[2 * part + 1], k_pos, scale, factor, site, shape, parameters,
                CAUSAL, WINDOWED, LOGITS, SLOPE, MASK, part != 1, D, BLOCK_D, BLOCK_M,
            )  # fmt: skip
    dk = _address(dk, seq, kv_row, kv_head, dkv_seq, dkv_stride, D)
    dv = _address(dv, seq, kv_row, kv_head, dkv_seq, dkv_stride, D)
    _store(dk, sum_k * scale, first, kv_len, dkv_stride, D, BLOCK_N, BLOCK_D)
    _store(dv, sum_v, first, kv_len, dkv_stride, D, BLOCK_N, BLOCK_D)


@triton.jit  # type: ignore[untyped-decorator]
def _fold_query_gradients(  # type: ignore[no-untyped-def]
    dq, queries, d_rows, norm, less, k, v, k_stride, v_stride, begin, end, rows, scale, factor, site, shape, parameters,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LOGITS: tl.constexpr, SLOPE: tl.constexpr, MASK: tl.constexpr,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what keys begin .. end give to dq (without the scale)."""
    for first in tl.range(begin, end, BLOCK_N):
        keys = _load(k, first, shape[1], k_stride, D, BLOCK_N, BLOCK_D, MASKED)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        k_pos = (first + tl.arange(0, BLOCK_N))[None, :]
        logits = _logits(s, rows, k_pos, scale, site, shape, parameters, CAUSAL, WINDOWED, LOGITS, MASK, MASKED)
        values = _load(v, first, shape[1], v_stride, D, BLOCK_N, BLOCK_D, MASKED)
        d_weights = tl.dot(d_rows, tl.trans(values), input_precision="ieee")
        _, d_logits = _gradients(
            s, logits, norm, d_weights, less, rows, k_pos, scale, factor, site, shape, parameters,
            SLOPE, MASKED or LOGITS is not None or MASK is not None,
        )  # fmt: skip
        dq = tl.dot(d_logits.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def backward_queries(  # type: ignore[no-untyped-def]
    q, q_seq, q_stride, q_head, k, k_seq, k_stride, k_head, v, v_seq, v_stride, v_head, q_indptr, kv_indptr,
    lse, lse_seq, lse_head, deltas, d_out, d_out_seq, d_out_stride, d_out_head, dq, dq_seq, dq_stride,
    q_len, kv_len, n_blocks, n_heads, scale, window, n_first, parameters,
    GROUP: tl.constexpr, RAGGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LOGITS: tl.constexpr,
    SLOPE: tl.constexpr, MASK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of a block of rows of one head of one sequence; of a head, the longest first."""
    first = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    head, seq = tl.program_id(0) // n_blocks % n_heads, tl.program_id(0) // n_blocks // n_heads
    kv_head, q_row0 = head // GROUP, seq * q_len
    q_row, q_len = _sequence(seq, q_indptr, q_len, RAGGED)
    kv_row, kv_len = _sequence(seq, kv_indptr, kv_len, RAGGED)
    if first >= q_len:
        return
    site, shape = (q_row if RAGGED else q_row0, head, kv_head), (q_len, kv_len, window, n_first)
    q_at = _address(q, seq, q_row, head, q_seq, q_stride, q_head)
    d_at = _address(d_out, seq, q_row, head, d_out_seq, d_out_stride, d_out_head)
    k_at = _address(k, seq, kv_row, kv_head, k_seq, k_stride, k_head)
    v_at = _address(v, seq, kv_row, kv_head, v_seq, v_stride, v_head)
    rows = first + tl.arange(0, BLOCK_M)
    queries = _load(q_at, first, q_len, q_stride, D, BLOCK_M, BLOCK_D, True)
    d_rows = _load(d_at, first, q_len, d_out_stride, D, BLOCK_M, BLOCK_D, True)
    norm = _load_lse(_address(lse, seq, q_row, head, lse_seq, 1, lse_head), rows, q_len, True)
    less_at = _address(deltas, seq, q_row, head, lse_seq, 1, lse_head) + rows
    less = tl.load(less_at, mask=rows < q_len, other=0.0)
    factor = LOG2E * 1.0 if LOGITS is not None else scale * LOG2E
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    bounds = _seen_keys(first, BLOCK_M, shape, CAUSAL, WINDOWED, BLOCK_N)
    for part in tl.static_range(0 if WINDOWED else 2, 4):
        total = _fold_query_gradients(
            total, queries, d_rows, norm[:, None], less[:, None], k_at, v_at, k_stride, v_stride, bounds[2 * part],
            bounds[2 * part + 1], rows[:, None], scale, factor, site, shape, parameters,
            CAUSAL, WINDOWED, LOGITS, SLOPE, MASK, part != 2, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    dq = _address(dq, seq, q_row, head, dq_seq, dq_stride, D)
    _store(dq, total * scale, first, q_len, dq_stride, D, BLOCK_M, BLOCK_D)
