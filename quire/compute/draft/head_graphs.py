"""Captured chains of a head on a GPU: of all guesses the host hears once, when the last one is made.

Owns the buckets by number of sequences, two graphs each: known tokens up to the first guess, and one row that goes on
from the newest guess, which is replayed for each further place; and the memory through which they are reached, one copy
from the host. Does not own the data flow (`head.py`), nor what is not captured, as trees (`EagerSteps`).
Invariants: guesses equal those of `EagerSteps`; rows behind the guesses that a sequence wants, and padding, write to
page 0; the token table is read only.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from quire.compute.device.cuda import CudaDevice
from quire.compute.draft.drafter import Queued
from quire.compute.draft.head import Head
from quire.compute.draft.head_steps import EagerSteps, HeadRows, KnownFeatures
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import SlotTables
from quire.kernels.attention import op as attention
from quire.kernels.attention.schedule.plan import AttnPlan

logger = logging.getLogger("quire.engine")

STAGING_BYTES: Final = 8 << 20
MOST_EACH: Final = 16
"""Rows of known tokens of one sequence: more are read before, operation by operation."""
MOST_ROWS: Final = 1536
MOST_SEQUENCES: Final = 256
"""More guess operation by operation: their steps are long enough to hide the launches."""
SLOT, FIRST, LATEST, END, READ, N_DRAFTS = range(6)
"""Of a sequence: its slot, its first row, where its newest token stands at the latest; where it stands, and where the
tokens begin that were not read, or -1 where only the device knows; guesses wanted."""
N_LINES: Final = 6
SEQUENCE, PLACE = range(2)
"""Of a row of a known token: its sequence, and its place among the rows of that; -1: it is none."""


def chain_sizes(max_num_seqs: int, most_drafts: int) -> list[int]:
    """Numbers of sequences whose chains of up to most_drafts guesses are captured: powers of two, and the most."""
    most = min(max_num_seqs, MOST_SEQUENCES, MOST_ROWS // most_known(most_drafts))
    return sorted({1 << k for k in range(most.bit_length()) if 1 << k < most} | {most})


def most_known(most_drafts: int) -> int:
    """Rows of known tokens of one sequence in a captured chain: what the last step may have kept."""
    return min(1 + most_drafts, MOST_EACH)


@dataclasses.dataclass(frozen=True, slots=True)
class ChainGraphs:
    """Of one number of sequences."""

    begin: Callable[[], None]
    go_on: Callable[[], None]


class HeadGraphs:
    """`HeadSteps` and `QueuingSteps` by captured chains where they fit, else by `eager`."""

    def __init__(
        self,
        device: CudaDevice,
        head: Head,
        pool: KVPool,
        tables: SlotTables,
        known: KnownFeatures,
        eager: EagerSteps,
        max_num_seqs: int,
        most_drafts: int,
    ) -> None:
        """pool: the head's own, no layer of which has a window."""
        self._device, self._head, self._pool, self._tables = device, head, pool, tables
        self._features, self._eager = known, eager
        self._most_drafts, self.most_each = most_drafts, most_known(most_drafts)
        self._sizes = chain_sizes(max_num_seqs, most_drafts)
        most, own = self._sizes[-1], head.arch.arch
        n_rows = most * self.most_each
        self._known, self._behind = device.staging(STAGING_BYTES), device.staging(STAGING_BYTES)
        """What the two graphs read from the host: the second is filled while the first one runs."""
        self._rows = self._known.section((2, n_rows), torch.int64)
        self._sequences = self._known.section((N_LINES, most), torch.int64)
        like = plan_attention(pool, tables, *self._idle(1))[0]
        self._known_work, self._behind_work = (
            attention.plan_buffers(like, n, span_tokens=1, memory=staging.rest(torch.int32))
            for n, staging in ((n_rows, self._known), (most, self._behind))
        )
        self._token_ids = device.upload(head.token_ids)
        self._read = device.zeros((len(tables.tokens),), torch.int64)
        """Tokens of each slot that were read with the model's features, by chains."""
        self._places = device.zeros((most_drafts * 2 * most,), torch.int64)
        """Where the rows of guesses stand, place by place, and where their keys go."""
        self._place = device.zeros((1,), torch.int64)
        """Guesses of each sequence so far."""
        self._newest = device.zeros((most,), torch.int32)
        """These guesses."""
        self._states = device.zeros((most, own.hidden_size), head.dtype)
        """And the features that the rows of these read."""
        self._found = device.zeros((most_drafts * most,), torch.int32)
        self._logits = device.zeros((most, own.vocab_size), head.dtype)
        self._graphs: dict[int, ChainGraphs] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, largest first, so that smaller ones reuse its memory."""
        start_s = time.perf_counter()
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size)
        took_s = time.perf_counter() - start_s
        logger.info("graphs: chains of a head for %d numbers of sequences captured in %.1f s", len(self._sizes), took_s)

    def read(self, rows: HeadRows) -> None:
        """See `HeadSteps`."""
        self._eager.read(rows)

    def chain(self, rows: HeadRows, n_drafts: Sequence[int]) -> list[list[int]]:
        """See `HeadSteps`."""
        if not self.queues(len(n_drafts)) or np.diff(rows.q_indptr).max() > self.most_each:
            return self._eager.chain(rows, n_drafts)
        return self.queue(rows, n_drafts, is_late=False).read()

    def queues(self, n_sequences: int) -> bool:
        """See `QueuingSteps`."""
        return n_sequences <= self._sizes[-1]

    @torch.inference_mode()
    def queue(self, rows: HeadRows, n_drafts: Sequence[int], *, is_late: bool) -> Queued:
        """See `QueuingSteps`."""
        n_sequences, n_places = len(n_drafts), n_drafts[0]
        size = next(size for size in self._sizes if size >= n_sequences)
        graphs = self._graphs[size]
        self._known.begin()
        self._fill_known(size, rows, np.array(n_drafts), is_late=is_late)
        self._known.send()
        graphs.begin()
        if n_places > 1:
            self._behind.begin()
            self._plan_behind(rows, np.array(n_drafts))
            self._behind.send()
        for _ in range(n_places - 1):
            graphs.go_on()
        arriving = self._device.download([self._found[: n_places * size]])
        return Queued(list(n_drafts), list(range(n_sequences)), size, self._found, arriving)

    def begin(self, rows: HeadRows) -> np.ndarray:
        """See `HeadSteps`."""
        return self._eager.begin(rows)

    def level(self, rows: HeadRows, token_ids: np.ndarray, above: np.ndarray) -> np.ndarray:
        """See `HeadSteps`."""
        return self._eager.level(rows, token_ids, above)

    def _fill_known(self, size: int, rows: HeadRows, n_drafts: np.ndarray, *, is_late: bool) -> None:
        """Rows of known tokens, each a span of its own, work for which is planned where it stands at the latest."""
        n, n_rows, most, lines = len(n_drafts), len(rows.slots), size * self.most_each, self._rows.host
        first, latest = rows.q_indptr[:-1], rows.kv_lens - 1
        lines[SEQUENCE, :n_rows] = np.repeat(np.arange(n), np.diff(rows.q_indptr))
        lines[PLACE, :n_rows] = np.arange(n_rows) - np.repeat(first, np.diff(rows.q_indptr))
        lines[SEQUENCE, n_rows:most], lines[PLACE, n_rows:most] = 0, -1
        sequences = self._sequences.host[:, :size]
        sequences[:, n:] = np.array([self._tables.spare_slot, 0, 0, 0, 0, 1])[:, None]
        for line, values in enumerate((rows.span_slots, first, latest)):
            sequences[line, :n] = values
        sequences[END, :n] = -1 if is_late else latest
        sequences[READ, :n] = -1 if is_late else rows.positions[first]
        sequences[N_DRAFTS, :n] = n_drafts
        lens, slots = (rows.positions + 1).astype(np.int32), rows.slots.astype(np.int32)
        plan_attention(self._pool, self._tables, lens, slots, buffers=[self._known_work])

    def _plan_behind(self, rows: HeadRows, n_drafts: np.ndarray) -> None:
        """Work for the last place of each sequence, at the latest; the graph places rows before it attends."""
        lens = (rows.kv_lens + n_drafts - 1).astype(np.int32)
        plan_attention(self._pool, self._tables, lens, rows.span_slots, buffers=[self._behind_work])

    def _idle(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and slots of spans that each see one key, of no sequence."""
        return np.ones(n, np.int32), np.full(n, self._tables.spare_slot, np.int32)

    def _capture(self, size: int) -> ChainGraphs:
        plans = []
        for staging, work in ((self._known, self._known_work), (self._behind, self._behind_work)):
            staging.begin()
            if staging is self._known:
                self._sequences.host[:] = np.array([self._tables.spare_slot, 0, 0, 0, 0, 1])[:, None]
                self._rows.host[SEQUENCE], self._rows.host[PLACE] = 0, -1
            plans += plan_attention(self._pool, self._tables, *self._idle(size), buffers=[work])
            staging.send()
        known, behind = plans
        begin = self._device.capture(lambda: self._begin(size, known))
        if self._most_drafts == 1:
            return ChainGraphs(begin, lambda: None)
        return ChainGraphs(begin, self._device.capture(lambda: self._go_on(size, behind)))

    def _begin(self, size: int, plan: AttnPlan) -> None:
        """Rows of known tokens, and the first guess behind each sequence."""
        tables, (sequence, place) = self._tables, self._rows.device[:, : size * self.most_each]
        slot, first, latest, end, start, n_drafts = self._sequences.device[:, :size]
        end, start = torch.where(end < 0, tables.ends[slot], end), torch.where(start < 0, self._read[slot], start)
        tables.ends[slot], tables.behind[slot], self._read[slot] = end, latest - end, end + 1
        self._stand(slot, end, n_drafts)
        slots, last = slot[sequence], end[sequence]
        wished = start[sequence] + place
        positions = torch.minimum(wished.clamp(min=0), last)
        cache_locs = torch.where((place >= 0) & (wished <= last), tables.locs(slots, positions)[0], 0)
        features = self._states.new_empty((len(slots), self._states.shape[1]))
        self._features.read(tables.locs(slots, (positions - 1).clamp_(min=0))[0], positions, features)
        self._place.zero_()
        plan.place(positions)
        context = PagedContext(self._pool, [plan], [cache_locs])
        wanted = first + (end - start).clamp_(min=0)  # nothing new where the choice of a token failed
        self._guess(size, tables.tokens[slots, positions], features, positions, context, wanted)

    def _stand(self, slot: torch.Tensor, end: torch.Tensor, n_drafts: torch.Tensor) -> None:
        """Of the rows behind the known tokens of each sequence; those of guesses beyond the wanted ones stay at the
        last."""
        places = self._places[: self._most_drafts * 2 * len(slot)].view(-1, 2, len(slot))
        place = torch.arange(self._most_drafts, device=slot.device)[:, None]
        positions = end + torch.minimum(place, n_drafts - 1)
        cache_locs = self._tables.locs(slot.expand_as(positions), positions)[0]
        places[:, 0], places[:, 1] = positions, torch.where(place < n_drafts, cache_locs, 0)

    def _go_on(self, size: int, plan: AttnPlan) -> None:
        """A row for each newest guess, and the next one behind it."""
        places = self._places[: self._most_drafts * 2 * size].view(-1, 2, size)
        positions, cache_locs = places.index_select(0, self._place)[0]
        plan.place(positions)
        context = PagedContext(self._pool, [plan], [cache_locs])
        self._guess(size, self._newest[:size], self._states[:size], positions, context)

    def _guess(
        self,
        size: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        context: PagedContext,
        wanted: torch.Tensor | None = None,
    ) -> None:
        logits = self._logits[:size]
        states, _ = self._head.forward(token_ids, features, positions, context, wanted, logits)
        chained, newest = self._head.chained(states), self._newest[:size]
        if chained.data_ptr() != self._states.data_ptr():
            self._states[:size] = chained
        torch.index_select(self._token_ids, 0, logits.argmax(1), out=newest)
        found = self._found[: self._most_drafts * size].view(-1, size)
        found.index_copy_(0, self._place, newest[None])
        self._place.add_(1)
