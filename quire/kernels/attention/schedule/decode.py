"""The commonest step, cut with few calls: one row a span over pages, all keys of its window, nothing shared.

The result is what tiles.py's `cut_any` gives, in less than half of its time at small batches. Owns no decision: where
keys are cut is stream.py's.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.attention.schedule import stream
from quire.kernels.attention.schedule.pieces import (
    BEGIN,
    END,
    FIELDS,
    KV_AT,
    KV_HEAD,
    N_TOKENS,
    PARTIAL,
    POSITION,
    ROW,
    WorkList,
)
from quire.kernels.attention.schedule.plan import AttnPlan, Layout


def fits(plan: AttnPlan, shares: bool) -> bool:
    """Whether the step is such a step. shares: shared prefixes are read together where that pays."""
    if plan.layout is not Layout.PAGED or plan.n_first or plan.batch_invariant or not plan.causal:
        return False
    n_spans = len(plan.spans.kv_lens)
    indptr = plan.spans.q_indptr
    if (shares and plan.shared) or not n_spans or indptr[-1] != n_spans:
        return False
    return bool((indptr[1:] > indptr[:-1]).all())


def cut(plan: AttnPlan, n_ctas: int) -> WorkList:
    """The work of a step that `fits`; the query heads of a KV head fit a small line."""
    ends, n_heads, group = plan.spans.kv_lens, plan.heads.n_kv_heads, plan.heads.group
    first = np.maximum(ends - plan.window, 0) // stream.KEYS * stream.KEYS if plan.window else np.zeros_like(ends)
    cuts = stream.cuts(ends - first, n_heads, n_ctas)
    n_cuts = len(cuts.tile)
    at = cuts.tile + np.arange(1, n_cuts + 1)  # lines that begin at a cut
    begins = np.zeros(len(ends) * n_heads + n_cuts, bool)
    begins[at] = True
    span, head = np.divmod(np.arange(len(begins), dtype=np.int32) - np.cumsum(begins, dtype=np.int32), n_heads)

    tiles = np.zeros((len(ends), FIELDS), np.int32)
    tiles[:, ROW] = np.arange(len(ends))
    tiles[:, N_TOKENS] = 1
    tiles[:, POSITION] = ends - 1
    tiles[:, BEGIN] = first
    tiles[:, END] = ends
    tiles[:, KV_AT] = plan.spans.kv_at * np.int32(plan.paged_table.stride(0))
    tiles[:, PARTIAL] = -1
    lines = tiles.take(span, axis=0)
    lines[:, KV_HEAD] = head
    merges, parts = _split(lines, begins, at, cuts.offset, group)
    queue = stream.queue(cuts, len(lines), n_ctas)
    none = np.zeros(0, np.int32)
    return WorkList(lines, none.reshape(0, FIELDS), queue, none.reshape(0, 2), merges, parts, none, len(parts) * group)


def _split(
    lines: np.ndarray, begins: np.ndarray, at: np.ndarray, offset: np.ndarray, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sets the keys and the partial results of lines that begin or end at a cut, in place; (merges, parts)."""
    if not len(at):
        return np.zeros((0, 4), np.int32), np.zeros(0, np.int32)
    lines[at, BEGIN] += offset
    lines[at - 1, END] = lines[at, BEGIN]
    partial = begins.copy()
    partial[at - 1] = True
    chosen = partial.nonzero()[0]
    parts = np.arange(len(chosen), dtype=np.int32) * np.int32(group)
    lines[chosen, PARTIAL] = parts
    leads = (~begins[chosen]).nonzero()[0]
    merges = np.empty((len(leads), 4), np.int32)
    merges[:, :2] = lines[chosen[leads]][:, (ROW, KV_HEAD)]
    merges[:, 2] = leads
    merges[:-1, 3] = leads[1:] - leads[:-1]
    merges[-1, 3] = len(chosen) - leads[-1]
    return merges, parts
