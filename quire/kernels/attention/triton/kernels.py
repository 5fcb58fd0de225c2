"""Attention in Triton: kernels for small lines (persistent), for large lines, and for merging split results.

Flash attention (Dao 2022, algorithm 1) over lines of work (csrc/cuda/attention.h). A packed row is a token times a
query head of the KV head's group. Owns the arithmetic; launch sizes are launcher.py's, hooks' text hooks.py's.
Invariants: a dead key or row is clamped to a live one of its line before anything is read for it or a hook is called,
so that no foreign memory reaches a result; a hook that is absent (None) leaves no instruction behind. `param` is the
tuple of a variant's parameters (`params` is a name that Triton's launcher uses itself).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

PAGED, RAGGED, SPARSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TILE_FIELDS, MERGE_FIELDS = tl.constexpr(12), tl.constexpr(4)
MERGED_AT_ONCE = tl.constexpr(16)

INDICES = ["lines", "queue", "rows", "pages", "blocks", "merges", "parts"]
"""Views into one buffer: their alignment differs from step to step and must not choose another compilation."""


@triton.jit  # type: ignore[untyped-decorator]
def _position(index, blocks_at, blocks, LAYOUT: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Position in its sequence of the key with this index in the line's list of keys."""
    if LAYOUT == SPARSE:
        return tl.load(blocks + blocks_at + index // PAGE) * PAGE + index % PAGE
    else:
        return index


@triton.jit  # type: ignore[untyped-decorator]
def _offset(position, kv_at, pages, page_stride, token_stride, LAYOUT: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements from head and page 0 to the keys at these positions."""
    if LAYOUT == RAGGED:
        return (kv_at + position).to(tl.int64) * token_stride
    else:
        page = tl.load(pages + kv_at + position // PAGE).to(tl.int64)
        return page * page_stride + (position % PAGE) * token_stride


@triton.jit  # type: ignore[untyped-decorator]
def _transformed(  # type: ignore[no-untyped-def]
    x, base, offset, dims, position, kv_head, of_code, param, D: tl.constexpr, HOOK: tl.constexpr,
    PARTNER: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A key or value block after its hook, 0 beyond D. offset, position: along the keys; dims: across; of_code: the
    scale of what a page holds."""
    dim = tl.minimum(dims, D - 1)
    x = x.to(tl.float32) * of_code
    partner = x
    if PARTNER:
        other = tl.load(base + offset + (dim + D // 2) % D).to(tl.float32) * of_code
        partner = tl.where(dim < D // 2, -other, other)
    y = HOOK(x, partner, position, kv_head, dim, param)
    return tl.where(dims < D, y, 0.0).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    q, k, v, pages, blocks, kv_at, blocks_at, kv_head, k_page, k_token, v_page, v_token,
    begin, end, first, last, gap_at, gap, q_row, q_pos, q_head, top, total, acc, scale, k_scale, v_scale,
    window, n_first, param, EDGE: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTMAX: tl.constexpr, FAST: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LOGITS: tl.constexpr,
    MASK: tl.constexpr, PARTNERS: tl.constexpr,
):  # fmt: skip
    """Fold keys into the running maximum, sum and weighted values: begin + x for x in first .. last - 1, with `gap`
    added from x = gap_at on. Not EDGE: all of them are live, seen by every row (but for MASK), and no gap is crossed.
    """
    dims = tl.arange(0, BLOCK_D)
    for x in range(first, last, BLOCK_N):
        index = begin + x + tl.arange(0, BLOCK_N)
        live = index < end
        if EDGE:
            index += tl.where(x >= gap_at, gap, 0)
            live = index < end
            index = tl.minimum(index, end - 1)
        position = _position(index, blocks_at, blocks, LAYOUT, PAGE)
        k_at = _offset(position, kv_at, pages, k_page, k_token, LAYOUT, PAGE)
        v_at = _offset(position, kv_at, pages, v_page, v_token, LAYOUT, PAGE)
        if D == BLOCK_D:
            k_block = tl.load(k + k_at[None, :] + dims[:, None])
            v_block = tl.load(v + v_at[:, None] + dims[None, :])
        else:
            k_block = tl.load(k + k_at[None, :] + dims[:, None], mask=(dims < D)[:, None], other=0.0)
            v_block = tl.load(v + v_at[:, None] + dims[None, :], mask=(dims < D)[None, :], other=0.0)
        if SCALED:
            of_k, of_v = tl.load(k_scale + (k_at + D) // 4), tl.load(v_scale + (v_at + D) // 4)
            of_key, of_value = of_k[None, :], of_v[:, None]
        else:
            of_key, of_value = k_scale, v_scale
        if KEY is not None:
            k_block = _transformed(k_block, k, k_at[None, :], dims[:, None], position[None, :], kv_head, of_key,
                                   param, D, KEY, PARTNERS & 2, q.dtype)  # fmt: skip
        if VALUE is not None:
            v_block = _transformed(v_block, v, v_at[:, None], dims[None, :], position[:, None], kv_head, of_value,
                                   param, D, VALUE, PARTNERS & 4, q.dtype)  # fmt: skip
        s = tl.dot(q, k_block.to(q.dtype), input_precision="ieee")
        if SCALED and KEY is None:
            s = s * of_k[None, :]
        if not FAST:
            s = s * scale
        if LOGITS is not None:
            s = LOGITS(s, q_row, q_pos, position[None, :], q_head, kv_head, param)
        hidden = float("-inf") if SOFTMAX else 0.0
        if EDGE:
            seen = live[None, :]
            if CAUSAL:
                seen = seen & (position[None, :] <= q_pos)
            if WINDOWED:
                seen = seen & ((position[None, :] > q_pos - window) | (position < n_first)[None, :])
            s = tl.where(seen, s, hidden)
        if MASK is not None:
            s = tl.where(MASK(q_row, q_pos, position[None, :], q_head, kv_head, param), s, hidden)
        if SOFTMAX:
            factor = scale * LOG2E if FAST else LOG2E
            now = tl.maximum(top, tl.max(s, 1) * factor)
            base = now
            if EDGE or not FAST or MASK is not None:
                base = tl.where(now == float("-inf"), 0.0, now)
            p = tl.exp2(s * factor - base[:, None])
            rescale = tl.exp2(top - base)
            total = total * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            top = now
        else:
            p = s
            total += tl.sum(p, 1)
        if SCALED and VALUE is None:
            p = p * of_v[None, :]
        acc += tl.dot(p.to(q.dtype), v_block.to(q.dtype), input_precision="ieee")
    return top, total, acc


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(line, rows, n_tokens, packed, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of q and positions of packed rows; dead rows repeat the last token."""
    token = tl.minimum(packed // GROUP, n_tokens - 1)
    first, position = tl.load(line), tl.load(line + 2)
    gathered = token < tl.where(tl.load(line + 9) > 0, n_tokens, 0)
    row = tl.load(rows + 2 * (first + token), mask=gathered, other=0)
    listed = tl.load(rows + 2 * (first + token) + 1, mask=gathered, other=0)
    return tl.where(gathered, row, first + token), tl.where(gathered, listed, position + token)


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(  # type: ignore[no-untyped-def]
    begin, end, blocks_at, blocks, q_pos, window, n_first, LAYOUT: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """(end, gap_at, gap, head, main, stop), see `_fold`: x < head and x >= main need masks, main lies between them."""
    lowest, highest = tl.min(q_pos, 0), tl.max(q_pos, 0)
    if CAUSAL and LAYOUT != SPARSE:
        end = tl.minimum(end, highest + 1)
    gap_at, gap = begin * 0, begin * 0
    head = begin * 0
    n_keys = tl.maximum(end - begin, 0)
    if WINDOWED:
        if LAYOUT == SPARSE:
            head = n_keys
        else:
            gap_at = tl.cdiv(tl.maximum(tl.minimum(n_first, end) - begin, 0), BLOCK_N) * BLOCK_N
            gap = tl.maximum(lowest - window + 1 - begin - gap_at, 0)
            n_keys = tl.maximum(n_keys - gap, tl.minimum(gap_at, n_keys))
            head = gap_at + tl.cdiv(tl.maximum(highest - window + 1 - begin - gap - gap_at, 0), BLOCK_N) * BLOCK_N
    clear = end
    if CAUSAL:
        final = tl.maximum(end, begin + 1) - 1
        if LAYOUT == SPARSE:
            final = tl.load(blocks + blocks_at + final // PAGE, mask=end > begin, other=0) * PAGE + final % PAGE
        clear = end - tl.maximum(final - lowest, 0)
    main = head + tl.maximum(clear - begin - gap - head, 0) // BLOCK_N * BLOCK_N
    return end, gap_at, gap, head, main, n_keys


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    line, kv_head, first_row, n_tokens, partial,
    q, k, v, out, lse, rows, pages, blocks, partial_out, partial_lse, q_row_stride, q_head_stride,
    k_page, k_head, k_token, v_page, v_head, v_token, n_kv_heads, scale, k_scale, v_scale,
    window, n_first, param,
    LAYOUT: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CODED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTMAX: tl.constexpr, FAST: tl.constexpr, HAS_LSE: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, OUTPUT: tl.constexpr, PARTNERS: tl.constexpr,
):  # fmt: skip
    """Packed rows first_row .. first_row + BLOCK_M - 1 of one line for one KV head."""
    packed, dims = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row, q_pos = rows_of(line, rows, n_tokens, packed, GROUP)
    q_head = kv_head * GROUP + packed % GROUP
    live = packed < n_tokens * GROUP
    cells = live[:, None] & (dims < D)[None, :]
    dim = tl.minimum(dims, D - 1)[None, :]
    q_at = q + (row.to(tl.int64) * q_row_stride + q_head * q_head_stride)[:, None]
    x = tl.load(q_at + dims[None, :], mask=cells, other=0.0)
    if QUERY is not None:
        partner = x.to(tl.float32)
        if PARTNERS & 1:
            other = tl.load(q_at + (dim + D // 2) % D, mask=cells, other=0.0).to(tl.float32)
            partner = tl.where(dim < D // 2, -other, other)
        y = QUERY(x.to(tl.float32), partner, row[:, None], q_pos[:, None], q_head[:, None], kv_head, dim, param)
        x = tl.where(cells, y, 0.0).to(x.dtype)

    begin, kv_at, blocks_at = tl.load(line + 3), tl.load(line + 5), tl.load(line + 6)
    end, gap_at, gap, head, main, stop = _bounds(
        begin, tl.load(line + 4), blocks_at, blocks, q_pos, window, n_first, LAYOUT, PAGE, BLOCK_N, CAUSAL, WINDOWED
    )
    if CODED == 2:  # int8: scales lie behind the integers
        k_scale += kv_head.to(tl.int64) * k_head // 4
        v_scale += kv_head.to(tl.int64) * v_head // 4
    if CODED == 1 and KEY is None:  # one scale of all keys is a factor of the logits; a hook is given numbers
        scale = scale * k_scale
    k += kv_head.to(tl.int64) * k_head
    v += kv_head.to(tl.int64) * v_head
    top = tl.full([BLOCK_M], float("-inf") if SOFTMAX else 0.0, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOWED:
        top, total, acc = _fold(
            x, k, v, pages, blocks, kv_at, blocks_at, kv_head, k_page, k_token, v_page, v_token,
            begin, end, 0, tl.minimum(head, stop), gap_at, gap, row[:, None], q_pos[:, None], q_head[:, None],
            top, total, acc, scale, k_scale, v_scale, window, n_first, param,
            True, LAYOUT, PAGE, D, CODED == 2, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, SOFTMAX, FAST, KEY, VALUE, LOGITS,
            MASK, PARTNERS,
        )  # fmt: skip
    top, total, acc = _fold(
        x, k, v, pages, blocks, kv_at, blocks_at, kv_head, k_page, k_token, v_page, v_token,
        begin + gap, end, head, main, 0, 0, row[:, None], q_pos[:, None], q_head[:, None],
        top, total, acc, scale, k_scale, v_scale, window, n_first, param,
        False, LAYOUT, PAGE, D, CODED == 2, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, SOFTMAX, FAST, KEY, VALUE, LOGITS,
        MASK, PARTNERS,
    )  # fmt: skip
    top, total, acc = _fold(
        x, k, v, pages, blocks, kv_at, blocks_at, kv_head, k_page, k_token, v_page, v_token,
        begin + gap, end, main, stop, 0, 0, row[:, None], q_pos[:, None], q_head[:, None],
        top, total, acc, scale, k_scale, v_scale, window, n_first, param,
        True, LAYOUT, PAGE, D, CODED == 2, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, SOFTMAX, FAST, KEY, VALUE, LOGITS,
        MASK, PARTNERS,
    )  # fmt: skip

    log2_total = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
    if SOFTMAX:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if CODED == 1 and VALUE is None:
        acc = acc * v_scale
    if partial < 0:
        if OUTPUT is not None:
            acc = OUTPUT(acc, row[:, None], q_head[:, None], kv_head, dim, (log2_total * LN2)[:, None], param)
        at = row.to(tl.int64) * (n_kv_heads * GROUP) + q_head
        tl.store(out + at[:, None] * D + dims[None, :], acc.to(out.dtype.element_ty), mask=cells)
        if HAS_LSE:
            tl.store(lse + at, log2_total * LN2, mask=live)
    else:
        at = (partial + packed).to(tl.int64)
        tl.store(partial_out + at[:, None] * D + dims[None, :], acc, mask=cells)
        tl.store(partial_lse + at, log2_total, mask=live)


@triton.jit(do_not_specialize=["window", "n_first"], do_not_specialize_on_alignment=INDICES)  # type: ignore[untyped-decorator]
def small(  # type: ignore[no-untyped-def]
    lines, queue, q, k, v, out, lse, rows, pages, blocks, partial_out, partial_lse, q_row_stride, q_head_stride,
    k_page, k_head, k_token, v_page, v_head, v_token, n_kv_heads, scale, k_scale, v_scale,
    window, n_first, param,
    LAYOUT: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CODED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTMAX: tl.constexpr, FAST: tl.constexpr, HAS_LSE: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, OUTPUT: tl.constexpr, PARTNERS: tl.constexpr,
):  # fmt: skip
    """A CTA: lines queue[c] .. queue[c + 1] - 1, one after another."""
    cta = tl.program_id(0)
    for number in range(tl.load(queue + cta), tl.load(queue + cta + 1)):
        line = lines + number * TILE_FIELDS
        n_tokens = tl.load(line + 1)
        if n_tokens > 0:
            _tile(
                line, tl.load(line + 8), 0, n_tokens, tl.load(line + 7),
                q, k, v, out, lse, rows, pages, blocks, partial_out, partial_lse, q_row_stride, q_head_stride,
                k_page, k_head, k_token, v_page, v_head, v_token, n_kv_heads, scale, k_scale, v_scale,
                window, n_first, param,
                LAYOUT, PAGE, GROUP, D, CODED, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, SOFTMAX, FAST, HAS_LSE,
                QUERY, KEY, VALUE, LOGITS, MASK, OUTPUT, PARTNERS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["window", "n_first"], do_not_specialize_on_alignment=INDICES)  # type: ignore[untyped-decorator]
def large(  # type: ignore[no-untyped-def]
    lines, q, k, v, out, lse, rows, pages, blocks, partial_out, partial_lse, q_row_stride, q_head_stride,
    k_page, k_head, k_token, v_page, v_head, v_token, n_kv_heads, scale, k_scale, v_scale,
    window, n_first, param,
    CHUNKS: tl.constexpr, LAYOUT: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    CODED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTMAX: tl.constexpr, FAST: tl.constexpr, HAS_LSE: tl.constexpr, QUERY: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, OUTPUT: tl.constexpr,
    PARTNERS: tl.constexpr,
):  # fmt: skip
    """One line for one KV head, or one of its CHUNKS runs of BLOCK_M packed rows; heads are neighbours in the grid."""
    program = tl.program_id(0)
    kv_head = program % n_kv_heads
    first_row = program // n_kv_heads % CHUNKS * BLOCK_M
    line = lines + program // n_kv_heads // CHUNKS * TILE_FIELDS
    n_tokens, partial = tl.load(line + 1), tl.load(line + 7)
    if partial >= 0:
        partial += kv_head * n_tokens * GROUP
    if first_row < n_tokens * GROUP:
        _tile(
            line, kv_head, first_row, n_tokens, partial,
            q, k, v, out, lse, rows, pages, blocks, partial_out, partial_lse, q_row_stride, q_head_stride,
            k_page, k_head, k_token, v_page, v_head, v_token, n_kv_heads, scale, k_scale, v_scale,
            window, n_first, param,
            LAYOUT, PAGE, GROUP, D, CODED, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOWED, SOFTMAX, FAST, HAS_LSE,
            QUERY, KEY, VALUE, LOGITS, MASK, OUTPUT, PARTNERS,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=INDICES)  # type: ignore[untyped-decorator]
def merge(  # type: ignore[no-untyped-def]
    merges, parts, partial_out, partial_lse, out, lse, n_kv_heads, param, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, SOFTMAX: tl.constexpr, HAS_LSE: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """One packed row: the mean of its partial results weighted by 2^lse (their sum without softmax), in order."""
    line, in_group = merges + tl.program_id(0) * MERGE_FIELDS, tl.program_id(1)
    row, kv_head, parts_at, n_parts = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([1], float("-inf") if SOFTMAX else 0.0, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for i in range(0, n_parts, MERGED_AT_ONCE):
        part = i + tl.arange(0, MERGED_AT_ONCE)
        known = part < n_parts
        at = tl.load(parts + parts_at + part, mask=known, other=0).to(tl.int64) + in_group
        log2_total = tl.load(partial_lse + at, mask=known, other=float("-inf"))
        if SOFTMAX:
            known = log2_total > float("-inf")
        cells = known[:, None] & (dims < D)[None, :]
        block = tl.load(partial_out + at[:, None] * D + dims[None, :], mask=cells, other=0.0)
        if SOFTMAX:
            now = tl.maximum(top, tl.max(log2_total, 0))
            base = tl.where(now == float("-inf"), 0.0, now)
            weight = tl.exp2(log2_total - base)
            rescale = tl.exp2(top - base)
            total = total * rescale + tl.sum(weight, 0)
            acc = acc * rescale + tl.sum(block * weight[:, None], 0)
            top = now
        else:
            total += tl.sum(tl.exp2(log2_total), 0)
            acc += tl.sum(block, 0)
    if n_parts > 0:
        whole = tl.where(total == 0.0, 1.0, total)
        log_total = tl.where(total == 0.0, float("-inf"), top + tl.log2(whole)) * LN2
        if SOFTMAX:
            acc = acc / whole
        q_head = kv_head * GROUP + in_group
        if OUTPUT is not None:
            acc = OUTPUT(acc, row, q_head, kv_head, tl.minimum(dims, D - 1), log_total, param)
        at = row.to(tl.int64) * (n_kv_heads * GROUP) + q_head
        tl.store(out + at * D + dims, acc.to(out.dtype.element_ty), mask=dims < D)
        if HAS_LSE:
            tl.store(lse + at + tl.arange(0, 1), log_total)
