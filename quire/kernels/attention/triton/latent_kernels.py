"""Latent attention in Triton: kernels for small lines (persistent) and large lines, over pages of one line a token.

As kernels.py, for one KV head whose value is the first RANK numbers of its key, so that each is read once; the other
ROPE numbers have a product of their own. Merging is kernels.py's. The same invariants hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.attention.triton.kernels import INDICES, LN2, LOG2E, TILE_FIELDS, rows_of


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    q, q_rope, keys, pages, kv_at, page_stride, token_stride, first, last, end, q_pos, top, total, acc, factor,
    EDGE: tl.constexpr, PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold keys first .. last - 1 into the running maximum, sum and weighted values. Not EDGE: every row sees all."""
    dims, rest = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    for x in range(first, last, BLOCK_N):
        position = x + tl.arange(0, BLOCK_N)
        live = position < end
        if EDGE:
            position = tl.minimum(position, end - 1)
        page = tl.load(pages + kv_at + position // PAGE).to(tl.int64)
        at = page * page_stride + (position % PAGE) * token_stride
        if RANK == BLOCK_R:
            block = tl.load(keys + at[:, None] + dims[None, :])
        else:
            block = tl.load(keys + at[:, None] + dims[None, :], mask=(dims < RANK)[None, :], other=0.0)
        if ROPE == BLOCK_D:
            rope = tl.load(keys + at[None, :] + RANK + rest[:, None])
        else:
            rope = tl.load(keys + at[None, :] + RANK + rest[:, None], mask=(rest < ROPE)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(block), input_precision="ieee")
        s = tl.dot(q_rope, rope, acc=s, input_precision="ieee")
        if EDGE:
            s = tl.where(live[None, :] & (position[None, :] <= q_pos[:, None]), s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 1) * factor)
        base = now
        if EDGE:
            base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s * factor - base[:, None])
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(block.dtype), block, acc=acc * rescale[:, None], input_precision="ieee")
        top = now
    return top, total, acc


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    line, first_row, n_tokens, q, keys, out, lse, rows, pages, partial_out, partial_lse, q_row_stride, q_head_stride,
    page_stride, token_stride, scale, PAGE: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Packed rows first_row .. first_row + BLOCK_M - 1 of one line."""
    packed = first_row + tl.arange(0, BLOCK_M)
    dims, rest = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_D)[None, :]
    row, q_pos = rows_of(line, rows, n_tokens, packed, GROUP)
    q_head, live = packed % GROUP, packed < n_tokens * GROUP
    q_at = q + (row.to(tl.int64) * q_row_stride + q_head * q_head_stride)[:, None]
    x = tl.load(q_at + dims, mask=live[:, None] & (dims < RANK), other=0.0)
    x_rope = tl.load(q_at + RANK + rest, mask=live[:, None] & (rest < ROPE), other=0.0)

    begin, kv_at, partial = tl.load(line + 3), tl.load(line + 5), tl.load(line + 7)
    lowest, highest = tl.min(q_pos, 0), tl.max(q_pos, 0)
    end = tl.minimum(tl.load(line + 4), highest + 1)
    main = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // BLOCK_N * BLOCK_N
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    factor = scale * LOG2E
    top, total, acc = _fold(
        x, x_rope, keys, pages, kv_at, page_stride, token_stride, begin, main, end, q_pos, top, total, acc, factor,
        False, PAGE, RANK, ROPE, BLOCK_R, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    top, total, acc = _fold(
        x, x_rope, keys, pages, kv_at, page_stride, token_stride, main, end, end, q_pos, top, total, acc, factor,
        True, PAGE, RANK, ROPE, BLOCK_R, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    whole = tl.where(total == 0.0, 1.0, total)
    log2_total = tl.where(total == 0.0, float("-inf"), top + tl.log2(whole))
    acc = acc / whole[:, None]
    cells = live[:, None] & (dims < RANK)
    if partial < 0:
        at = row.to(tl.int64) * GROUP + q_head
        tl.store(out + at[:, None] * RANK + dims, acc.to(out.dtype.element_ty), mask=cells)
        if HAS_LSE:
            tl.store(lse + at, log2_total * LN2, mask=live)
    else:
        at = (partial + packed).to(tl.int64)
        tl.store(partial_out + at[:, None] * RANK + dims, acc, mask=cells)
        tl.store(partial_lse + at, log2_total, mask=live)


@triton.jit(do_not_specialize_on_alignment=INDICES)  # type: ignore[untyped-decorator]
def small(  # type: ignore[no-untyped-def]
    lines, queue, q, keys, out, lse, rows, pages, partial_out, partial_lse, q_row_stride, q_head_stride, page_stride,
    token_stride, scale, PAGE: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """A CTA: lines queue[c] .. queue[c + 1] - 1, one after another."""
    cta = tl.program_id(0)
    for number in range(tl.load(queue + cta), tl.load(queue + cta + 1)):
        line = lines + number * TILE_FIELDS
        n_tokens = tl.load(line + 1)
        if n_tokens > 0:
            _tile(
                line, 0, n_tokens, q, keys, out, lse, rows, pages, partial_out, partial_lse, q_row_stride,
                q_head_stride, page_stride, token_stride, scale, PAGE, GROUP, RANK, ROPE, BLOCK_R, BLOCK_D, BLOCK_M,
                BLOCK_N, HAS_LSE,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=INDICES)  # type: ignore[untyped-decorator]
def large(  # type: ignore[no-untyped-def]
    lines, q, keys, out, lse, rows, pages, partial_out, partial_lse, q_row_stride, q_head_stride, page_stride,
    token_stride, scale, CHUNKS: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One of a line's CHUNKS runs of BLOCK_M packed rows; runs of a line are neighbours, as they read the same keys."""
    line = lines + tl.program_id(0) // CHUNKS * TILE_FIELDS
    first_row, n_tokens = tl.program_id(0) % CHUNKS * BLOCK_M, tl.load(line + 1)
    if first_row < n_tokens * GROUP:
        _tile(
            line, first_row, n_tokens, q, keys, out, lse, rows, pages, partial_out, partial_lse, q_row_stride,
            q_head_stride, page_stride, token_stride, scale, PAGE, GROUP, RANK, ROPE, BLOCK_R, BLOCK_D, BLOCK_M,
            BLOCK_N, HAS_LSE,
        )  # fmt: skip
