"""`PlanBuilder`: a plan while it is written, then the record by which its result is understood. Owns no policy."""

from __future__ import annotations

from quire.control.adapters import AdapterPlaces
from quire.control.cache import PageCache, salt_of
from quire.control.seq import NEVER, Seq
from quire.control.snapshots import Snapshots
from quire.core.plan import PageAppend, PageCopy, SlotOpen, Spans, StateRestore, StateSave, StepPlan


class PlanBuilder:
    """`seqs[i]` is the sequence of span i of `plan`."""

    __slots__ = (
        "_adapters", "budgets", "committed", "n_chunks", "n_drafting", "plan", "scheduled_s", "seqs", "step", "tight",
    )  # fmt: skip

    def __init__(
        self, step: int, budget: int, now_s: float, committed: int, adapters: AdapterPlaces, n_dp_ranks: int = 1
    ) -> None:
        self.step, self.scheduled_s, self._adapters = step, now_s, adapters
        self.budgets = [budget] * n_dp_ranks
        """Tokens that may still be added, of each data-parallel rank."""
        self.committed = committed
        """The last step whose result had come."""
        self.tight: set[int] = set()
        """Data-parallel ranks where a running sequence lacked pages: nobody is admitted there in this step."""
        self.n_chunks = 0
        """Spans that compute parts of prompts."""
        self.n_drafting = 0
        """Spans that verify drafts."""
        self.plan = StepPlan(step, Spans(), committed=committed)
        self.seqs: list[Seq] = []

    def span(self, seq: Seq, length: int) -> None:
        """Compute the next `length` tokens of `seq`; it wants a token if these are the last that are known, unless it
        wants a vector of its prompt instead."""
        start = seq.planned
        seq.plan(length, self.step)
        if seq.planned >= seq.prompt_len and seq.prompt_step == NEVER:
            seq.prompt_step = self.step
        wants = seq.planned == seq.prefill_end and seq.request.pooling is None
        if wants and seq.is_masked:
            self.plan.masked.append(len(self.seqs))
        self.plan.spans.add(seq.slot, start, length, wants)
        self.seqs.append(seq)
        self.budgets[seq.dp_rank] -= length

    def grow(self, cache: PageCache, seq: Seq, n: int) -> None:
        """`n` more pages for a running sequence, in each of its tables."""
        if n > 0:
            first, slot = len(seq.tables[0]), seq.slot
            self.plan.pages += [PageAppend(slot, first, pages, i) for i, pages in enumerate(cache.grow(seq, n))]

    def open(self, seq: Seq) -> None:
        """Announce a slot, its tokens and the pages that it starts with."""
        place = self._adapters.hold(seq, self.plan)
        self.plan.opened.append(
            SlotOpen(seq.slot, list(seq.tokens), seq.prompt_len, seq.params, salt_of(seq.request), place)
        )
        for group, (table, first) in enumerate(zip(seq.tables, seq.held_from, strict=True)):
            if len(table) > first:
                self.plan.pages.append(PageAppend(seq.slot, first, table[first:], group))

    def restore(self, seq: Seq, snapshot: int) -> None:
        """A sequence that enters goes on from a kept state."""
        self.plan.restores.append(StateRestore(seq.slot, snapshot))

    def save(self, cache: PageCache, seq: Seq, start: int) -> None:
        """Keep states of the prompt that this step computes from `start` on."""
        snapshots = cache.snapshots
        if snapshots is None or not cache.enabled:
            return
        for n_tokens in snapshots.places(start, seq.planned, seq.prefill_end, seq.n_shared * cache.page_size):
            self._save(cache, snapshots, seq, n_tokens)

    def save_decoded(self, cache: PageCache, snapshots: Snapshots, seq: Seq) -> None:
        """Keep the state of a decoding sequence in place of the one before it."""
        for n in [n for n in seq.snapshots if n * cache.page_size > seq.prompt_len]:
            snapshots.drop(seq.snapshots[n])
        self._save(cache, snapshots, seq, seq.planned)

    def _save(self, cache: PageCache, snapshots: Snapshots, seq: Seq, n_tokens: int) -> None:
        n_pages = n_tokens // cache.page_size
        found = cache.place(seq, n_pages) if n_tokens <= len(seq.tokens) else None
        if found is None or found.node is None:
            snapshot = snapshots.take(seq, n_pages, self.step)
        else:
            snapshot = snapshots.take(found.node, found.n_in_node, self.step)
        if snapshot is not None:
            self.plan.saves.append(StateSave(seq.slot, n_tokens, snapshot))

    def copy(self, seq: Seq, source: int, target: int, n_tokens: int) -> None:
        """Copy rows of a page that earlier plans filled to one of a running sequence."""
        self.plan.copies.append(PageCopy(source, target, n_tokens, seq.slot))
