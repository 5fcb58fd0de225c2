"""Cuts the spans of a step into lines of work for a GPU: which rows, which keys, where partial results go.

Host only, numpy. Owns the tiles before their keys are split, and the order of lines (csrc/cuda/attention.h); where
they are split: stream.py (small tiles: decode) and large.py (prefill); prefixes: prefix.py; merges: parts.py; the
commonest step: decode.py.
Invariants: every row meets each key it may see in exactly one line for each KV head; a split lies at a multiple of 64
keys (small) or 128 keys (large) from the tile's first key.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.attention.schedule import decode, large, parts, prefix, stream
from quire.kernels.attention.schedule.pieces import (
    BEGIN,
    BLOCKS_AT,
    END,
    FIELDS,
    KV_AT,
    LARGE_ROWS,
    N_TOKENS,
    PARTIAL,
    POSITION,
    ROW,
    Tiles,
    WorkList,
    repeat,
    split,
)
from quire.kernels.attention.schedule.plan import AttnPlan, Layout

NO_LIMIT = 1 << 30
LATENT_ROWS = 64
"""Packed rows of a CTA of latent attention."""


def small_rows_of(group: int) -> int:
    """Packed rows (tokens x query heads of a KV head) up to which a span gets small lines."""
    return min(64, max(16, 1 << (group - 1).bit_length()))


def large_tokens_of(group: int) -> int:
    """Tokens of a large line."""
    return LARGE_ROWS // group


def cut(plan: AttnPlan, n_ctas: int, max_large: int = NO_LIMIT) -> WorkList:
    """The work of one step for a persistent grid of n_ctas; large lines are split into at most max_large lines.

    max_large 0 also leaves shared prefixes unshared.
    """
    if plan.heads.group <= small_rows_of(plan.heads.group) and decode.fits(plan, shares=max_large > 0):
        work = decode.cut(plan, n_ctas)
        if work is not None:
            return work
    return cut_any(plan, n_ctas, max_large)


def cut_any(plan: AttnPlan, n_ctas: int, max_large: int = NO_LIMIT) -> WorkList:
    """`cut` of any step."""
    group, n_heads = plan.heads.group, plan.heads.n_kv_heads
    spans = _spans(plan)
    groups = prefix.choose(plan, spans, small_rows_of(group), n_ctas) if max_large else []
    rows, gathered, joined = prefix.gather(plan, spans, groups)
    fits = spans[:, N_TOKENS] * group <= small_rows_of(group) if plan.few is None else plan.few
    few = _small_tiles(plan, spans, joined, fits, gathered)
    many = _large_tiles(plan, spans, joined, ~fits, gathered)

    if plan.batch_invariant:
        small_cuts = stream.fixed_cuts(few.n_keys, n_heads, stream.INVARIANT_KEYS)
        large_cuts = stream.fixed_cuts(many.n_keys, 1, large.INVARIANT_KEYS)
    else:
        small_cuts = stream.cuts(few.n_keys, n_heads, n_ctas)
        large_cuts = large.cuts(many.n_keys, n_heads, max(1, n_ctas // _ctas_of_large(plan, many)), max_large)
    small_pieces = split(few, small_cuts, n_heads, 1)
    large_pieces = split(many, large_cuts, 1, n_heads)
    table, joined_parts, n_partial_rows = parts.join(plan, small_pieces, large_pieces, rows)
    if plan.batch_invariant:
        by_cta, queue = stream.assign(_n_visible(plan, small_pieces.lines), n_ctas)
        small = small_pieces.lines[by_cta]
    else:
        small, queue = small_pieces.lines, stream.queue(small_cuts, len(small_pieces.lines), n_ctas)
    queued = _queue_order(_n_visible(plan, large_pieces.lines), large_pieces.lines[:, KV_AT])
    blocks = plan.spans.blocks if plan.spans.blocks is not None else np.zeros(0, np.int32)
    return WorkList(small, large_pieces.lines[queued], queue, rows, table, joined_parts, blocks, n_partial_rows)


def _ctas_of_large(plan: AttnPlan, tiles: Tiles) -> int:
    """CTAs side by side that a large line keeps busy, of each KV head: of latent attention as many as its rows fill."""
    if not plan.heads.value_dim or not len(tiles.lines):
        return 1
    return -(-int(tiles.lines[:, N_TOKENS].max()) * plan.heads.group // LATENT_ROWS)


def _queue_order(n_visible: np.ndarray, kv_at: np.ndarray) -> np.ndarray:
    """Dear lines first, so that the last ones to finish are short; lines of one sequence together, as they read the
    same keys: 16 prompts of 4k tokens take 14 % longer with their lines mixed (H200)."""
    _, sequence = np.unique(kv_at, return_inverse=True)
    dearest = np.zeros(len(kv_at), n_visible.dtype)
    np.maximum.at(dearest, sequence, n_visible)
    return np.lexsort((-n_visible, sequence, -dearest[sequence]))


def _spans(plan: AttnPlan) -> np.ndarray:
    """int32 [n_spans, 12]: each span as if it were one tile, with all of its keys."""
    spans = plan.spans
    table = np.zeros((len(spans.kv_lens), FIELDS), np.int32)
    lengths = spans.lengths
    table[:, ROW] = spans.q_indptr[:-1]
    table[:, N_TOKENS] = lengths
    table[:, POSITION] = spans.kv_lens - lengths
    table[:, END] = spans.kv_lens
    stride = 1 if plan.page_table is None else plan.page_table.stride(0)
    table[:, KV_AT] = spans.kv_at * np.int32(stride)
    table[:, PARTIAL] = -1
    if plan.layout is Layout.SPARSE:
        indptr, blocks = spans.listed
        first, last = indptr[:-1], indptr[1:]
        table[:, BLOCKS_AT] = first
        table[:, END] = (last - first) * plan.page_size
        named = last > first
        beyond = (blocks[last[named] - 1] + 1) * plan.page_size - spans.kv_lens[named]
        table[named, END] -= np.maximum(beyond, 0)
    return table


def _small_tiles(
    plan: AttnPlan, spans: np.ndarray, joined: np.ndarray | None, fits: np.ndarray, gathered: np.ndarray
) -> Tiles:
    """A tile for each span that fits, after the gathered ones that do."""
    chosen = fits & (spans[:, N_TOKENS] > 0)
    first = gathered[gathered[:, N_TOKENS] * plan.heads.group <= small_rows_of(plan.heads.group)]
    table, joins = _behind(first, spans, joined, chosen)
    return _visible(plan, table, joins, stream.KEYS)


def _large_tiles(
    plan: AttnPlan, spans: np.ndarray, joined: np.ndarray | None, chosen: np.ndarray, gathered: np.ndarray
) -> Tiles:
    """The chosen spans in tiles of whole tokens, after the gathered ones that do not fit a small tile."""
    first = gathered[gathered[:, N_TOKENS] * plan.heads.group > small_rows_of(plan.heads.group)]
    table, joins = _behind(first, spans, joined, chosen)
    if not len(table):
        return Tiles(table, table[:, END], None, None, None)
    n_tokens = large_tokens_of(plan.heads.group)
    owner, index = repeat(-(-table[:, N_TOKENS] // n_tokens))
    table = table[owner]
    table[:, ROW] += index * n_tokens
    table[:, POSITION] += index * n_tokens
    table[:, N_TOKENS] = np.minimum(table[:, N_TOKENS] - index * n_tokens, n_tokens)
    return _visible(plan, table, None if joins is None else joins[owner], large.KEYS)


def _behind(
    first: np.ndarray, spans: np.ndarray, joined: np.ndarray | None, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The chosen spans behind gathered tiles, whose results are always partial, and whether each tile's are."""
    table = spans if chosen.all() else spans[chosen]
    if joined is None:
        return table, None
    return np.concatenate((first, table)), np.concatenate((np.ones(len(first), bool), joined[chosen]))


def _visible(plan: AttnPlan, table: np.ndarray, joined: np.ndarray | None, step: int) -> Tiles:
    """Trim the keys of tiles to those that some row sees; ranges begin at multiples of `step`."""
    if plan.layout is Layout.SPARSE:
        return Tiles(table, table[:, END] - table[:, BEGIN], None, None, joined)
    if plan.causal:
        own = table[:, POSITION] + table[:, N_TOKENS]
        np.maximum(np.minimum(own, table[:, END]), table[:, BEGIN], out=table[:, END])
    if not plan.window:
        return Tiles(table, table[:, END] - table[:, BEGIN], None, None, joined)
    lower = np.maximum(table[:, POSITION] - (plan.window - 1), 0) // step * step
    lower = np.minimum(lower, table[:, END] // step * step)
    if not plan.n_first:
        table[:, BEGIN] = lower
        return Tiles(table, table[:, END] - lower, None, None, joined)
    n_first = -(-plan.n_first // step) * step
    gap = np.maximum(lower - n_first, 0)
    return Tiles(table, table[:, END] - gap, n_first, gap, joined)


def _n_visible(plan: AttnPlan, lines: np.ndarray) -> np.ndarray:
    """int32 [n]: keys of each line that some row may see."""
    keys: np.ndarray = lines[:, END] - lines[:, BEGIN]
    if not plan.n_first or plan.layout is Layout.SPARSE:
        return keys
    lower = np.minimum(np.maximum(lines[:, POSITION] - (plan.window - 1), lines[:, BEGIN]), lines[:, END])
    seen: np.ndarray = keys - np.maximum(lower - np.maximum(plan.n_first, lines[:, BEGIN]), 0)
    return seen
