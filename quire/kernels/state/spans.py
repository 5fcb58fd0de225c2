"""Which rows of a flat batch belong to which sequence, and where each of these keeps its state.

Rows of a span are cut into pieces of at most `PIECE` rows, which kernels take one after the other; the state behind a
piece can be kept (a snapshot). Owns the cutting. Does not own states nor what a state is.
Invariants: the rows of a batch are its pieces in order; a span reads and writes one line of each state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from quire.config.states import PIECE

NOWHERE: Final = -1


@dataclasses.dataclass(frozen=True, slots=True)
class StateSpans:
    """One step's spans, on the device of the states."""

    lines: torch.Tensor
    """int32 [n_spans]: the line of each state that a span goes on from, and writes."""
    fresh: torch.Tensor
    """int32 [n_spans]: not 0 where a span begins with zeros, whatever its line holds."""
    piece_ptr: torch.Tensor | None = None
    """int32 [n_spans + 1]: pieces of span i are piece_ptr[i] .. piece_ptr[i + 1]. None: each span is one row."""
    row_ptr: torch.Tensor | None = None
    """int32 [n_pieces + 1]: rows of a piece, likewise; None as above."""
    keep: torch.Tensor | None = None
    """int32 [n_pieces]: the line to which the state behind a piece goes as well, or `NOWHERE`."""
    span_of: torch.Tensor | None = None
    """int32 [n_pieces]: the span of a piece."""
    first: StateSpans | None = None
    """Spans of one row each that stand before these in the batch: sequences that decode beside prompts."""

    @property
    def n_first(self) -> int:
        """Rows of `first`."""
        return 0 if self.first is None else len(self.first.lines)

    @property
    def is_single(self) -> bool:
        """Each span is one row, and nothing is kept."""
        return self.piece_ptr is None


def single_rows(lines: torch.Tensor, positions: torch.Tensor) -> StateSpans:
    """Spans of one row each. lines, positions: [n]."""
    return StateSpans(lines.to(torch.int32), (positions == 0).to(torch.int32))


def spans_of(arrays: Sequence[torch.Tensor], first: StateSpans | None = None) -> StateSpans:
    """Of what `plan_spans` gave, on the device of the states."""
    lines, fresh, piece_ptr, row_ptr, keep, span_of = arrays
    return StateSpans(lines, fresh, piece_ptr, row_ptr, keep, span_of, first)


def plan_spans(
    q_indptr: np.ndarray, lines: np.ndarray, starts: np.ndarray, kept: Sequence[tuple[int, int, int]] = ()
) -> tuple[np.ndarray, ...]:
    """(lines, fresh, piece_ptr, row_ptr, keep, span_of), each int32, as of `StateSpans`, of the host.

    q_indptr: [n_spans + 1], rows of each span; starts: positions of their first rows. kept: (span, number of its rows,
    line) of states to keep behind so many rows, at most one for a number of rows.
    """
    lengths, fresh = np.diff(q_indptr), (starts == 0).astype(np.int32)
    if not kept and lengths.max(initial=0) <= PIECE:
        numbers = np.arange(len(lengths) + 1, dtype=np.int32)
        keep = np.full(len(lengths), NOWHERE, np.int32)
        return lines.astype(np.int32), fresh, numbers, q_indptr.astype(np.int32), keep, numbers[:-1]
    cuts: dict[int, dict[int, int]] = {}
    for span, n_rows, line in kept:
        cuts.setdefault(span, {})[n_rows] = line
    counts = -(-lengths // PIECE)
    ends, keeps = [], []
    for span, (first, length) in enumerate(zip(q_indptr[:-1].tolist(), lengths.tolist(), strict=True)):
        own = cuts.get(span, {})
        places = sorted({*own, *range(PIECE, length, PIECE), length})
        counts[span] = len(places)
        ends += [first + place for place in places]
        keeps += [own.get(place, NOWHERE) for place in places]
    piece_ptr, row_ptr = np.zeros(len(lengths) + 1, np.int32), np.zeros(len(ends) + 1, np.int32)
    np.cumsum(counts, out=piece_ptr[1:])
    row_ptr[1:] = ends
    span_of = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    return lines.astype(np.int32), fresh, piece_ptr, row_ptr, np.array(keeps, np.int32), span_of


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [n, heads, size] with the heads of a row behind one another."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
