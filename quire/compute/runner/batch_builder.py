"""From a plan's spans to the arrays of one flat batch: which slot and position each row is, which rows are sampled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from quire.core.plan import Spans
from quire.kernels.attention.schedule.plan import SharedPrefix
from quire.kernels.fused_step import TreeRows


@dataclasses.dataclass(slots=True)
class FlatBatch:
    """Host arrays of one step over `n_tokens` rows and `n_spans` spans."""

    row_slots: np.ndarray
    """int64 [n_tokens]."""
    row_positions: np.ndarray
    """int64 [n_tokens]."""
    q_indptr: np.ndarray
    """int32 [n_spans + 1]: rows of span i are q_indptr[i] .. q_indptr[i+1]."""
    kv_lens: np.ndarray
    """int32 [n_spans]: tokens that span i's last row attends to."""
    span_slots: np.ndarray
    """int32 [n_spans]."""
    sampled_rows: np.ndarray
    """int64 [m]: last rows of the spans that want a token: one for it, and one for each draft."""
    sampled_slots: np.ndarray
    """int64 [m]."""
    sampled_positions: np.ndarray
    """int64 [m]: positions of the tokens to be sampled."""
    mask_lines: np.ndarray
    """int32 [m]: the line of the step's masks that holds for a sampled row, or -1."""
    trees: TreeRows | None = None
    """Where some spans are trees: then positions are those by depth."""

    @property
    def places(self) -> np.ndarray:
        """int64 [n_tokens]: where each row's token stands in the token table, and its key in the pages."""
        return self.row_positions if self.trees is None else self.trees.places

    @property
    def n_masks(self) -> int:
        """Lines of the step's masks."""
        return int(np.count_nonzero(self.mask_lines >= 0))


def build_batch(spans: Spans, masked: Sequence[int] = ()) -> FlatBatch:
    """Rows in span order. O(n_tokens) in numpy, no Python loop over tokens. masked: spans that have masks."""
    slots = np.array(spans.slots, np.int64)
    starts = np.array(spans.starts, np.int64)
    if all(spans.wants) and sum(spans.lengths) == len(slots) + sum(spans.n_drafts):
        return _all_sampled(slots, starts, spans.lengths, masked)
    lengths = np.asarray(spans.lengths, np.int64)
    wanted = np.flatnonzero(np.asarray(spans.wants, bool))
    q_indptr = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(lengths, out=q_indptr[1:])
    if int(q_indptr[-1]) == len(slots):  # every span has one row
        row_slots, row_positions = slots, starts
    else:
        row_slots = np.repeat(slots, lengths)
        row_positions = np.arange(q_indptr[-1]) + np.repeat(starts - q_indptr[:-1], lengths)
    ends = starts + lengths
    sampled_rows = q_indptr[1:][wanted].astype(np.int64) - 1
    if any(spans.n_drafts):
        wanted, back = _with_drafts(wanted, np.asarray(spans.n_drafts, np.int64)[wanted])
        sampled_rows = q_indptr[1:][wanted].astype(np.int64) - 1 - back
    sampled_slots, sampled_positions = row_slots[sampled_rows], row_positions[sampled_rows] + 1
    return FlatBatch(
        row_slots=row_slots,
        row_positions=row_positions,
        q_indptr=q_indptr,
        kv_lens=ends.astype(np.int32),
        span_slots=slots.astype(np.int32),
        sampled_rows=sampled_rows,
        sampled_slots=sampled_slots,
        sampled_positions=sampled_positions,
        mask_lines=_mask_lines(masked, len(slots), wanted),
    )


def _mask_lines(masked: Sequence[int], n_spans: int, row_spans: np.ndarray | None = None) -> np.ndarray:
    """int32 [m] of sampled rows, of these spans; None: one row of each."""
    n = n_spans if row_spans is None else len(row_spans)
    if len(masked) == n_spans:
        return np.arange(n, dtype=np.int32)
    lines = np.full(n, -1, np.int32)
    if masked:
        rows = np.array(masked)
        if row_spans is not None:
            is_masked = np.zeros(n_spans, bool)
            is_masked[rows] = True
            rows = np.flatnonzero(is_masked[row_spans])
        lines[rows] = np.arange(len(rows))
    return lines


def _with_drafts(wanted: np.ndarray, n_drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [m] twice: each span once for its token and once for each draft, and how far before its last row."""
    ends = np.cumsum(n_drafts + 1)
    back = np.repeat(ends, n_drafts + 1) - 1 - np.arange(ends[-1])
    return np.repeat(wanted, n_drafts + 1), back


def _all_sampled(slots: np.ndarray, starts: np.ndarray, span_lengths: list[int], masked: Sequence[int]) -> FlatBatch:
    """Every span is a token and its drafts, and wants what follows each: most steps."""
    n, row_spans = sum(span_lengths), None
    if n == len(slots):
        q_indptr, row_slots, row_positions, ends = np.arange(n + 1, dtype=np.int32), slots, starts, starts + 1
    else:
        lengths = np.array(span_lengths, np.int64)
        q_indptr = np.array([0, *itertools.accumulate(span_lengths)], np.int32)
        row_slots, ends = np.repeat(slots, lengths), starts + lengths
        row_spans = np.repeat(np.arange(len(slots)), lengths)
        row_positions = np.arange(n) + np.repeat(starts - q_indptr[:-1], lengths)
    return FlatBatch(
        row_slots=row_slots,
        row_positions=row_positions,
        q_indptr=q_indptr,
        kv_lens=ends.astype(np.int32),
        span_slots=slots.astype(np.int32),
        sampled_rows=np.arange(n),
        sampled_slots=row_slots,
        sampled_positions=row_positions + 1,
        mask_lines=_mask_lines(masked, len(slots), row_spans),
    )


def shared_spans(batch: FlatBatch, groups: list[tuple[list[int], int]], page_size: int) -> list[SharedPrefix]:
    """A plan's (slots, number of leading pages) as spans and keys; the keys end before every row of the group."""
    if not groups:  # most steps: the table below is work for each span
        return []
    span_of = {slot: span for span, slot in enumerate(batch.span_slots.tolist())}
    starts = batch.kv_lens - np.diff(batch.q_indptr)
    found = []
    for slots, n_pages in groups:
        spans = [span_of[slot] for slot in slots]
        n_whole = min(n_pages, int(starts[spans].min()) // page_size)
        found.append(SharedPrefix(spans, n_whole * page_size))
    return found
