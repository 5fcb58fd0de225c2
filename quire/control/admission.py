"""Who enters: waiting sequences in queue order, in chunks, with the tokens, slots and pages that running ones leave.

A sequence is admitted when pages for all its known tokens and one more are available beyond what running prompts still
need; it then takes only those of its first chunk. Check, then act: a refused one holds nothing and changes nothing.
Order is strict (the first that does not fit stops admission), with two stated exceptions: a parallel sample whose
sibling is computing their prompt waits for the next step, with a slot and pages set aside, and lets others pass; so
does, for some time, one for whose adapter there is no place (`adapters.py`).
Samples of a model with recurrent states do not fork: they enter like any prompt that begins as another did.
"""

from __future__ import annotations

from quire.control.beam_search import BeamSearch
from quire.control.cache import NO_MATCH
from quire.control.live_seqs import LiveSeqs
from quire.control.node import Match
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq, SeqState

MOST_PASSED = 64
"""Sequences that one step passes, because there is no place for their adapters, to look at those behind them."""


class Admission:
    """One step's admissions.

    committed: the last step whose result has come; prompts: the running sequences that have prompt left; n_seqs: most
    sequences that may run, if not as many as there are slots.
    """

    def __init__(
        self, live: LiveSeqs, builder: PlanBuilder, committed: int, prompts: list[Seq], n_seqs: int | None = None
    ) -> None:
        self.live = live
        self.builder = builder
        self.committed = committed
        self.admitted: list[Seq] = []
        self.claimed_pages = sum([live.cache.needed(seq.prefill_end, seq.tables, seq.held_from) for seq in prompts])
        """Pages that running prompts and deferred siblings will take soon."""
        self._lacks_place = False
        """A sequence before the next one waits for a place of its adapter."""
        self.claimed_slots = self._unused_slots = 0 if n_seqs is None else live.config.max_num_seqs - n_seqs
        for search in live.searches.values():
            if search.root.state is SeqState.RUNNING and search.n_lacking:
                self._claim(search)

    def run(self) -> None:
        """Admit until tokens, slots or pages run out or the queue's head must wait."""
        live, builder = self.live, self.builder
        deferred: list[Seq] = []
        while builder.budget > 0 and len(live.free_slots) > self.claimed_slots:
            seq = live.waiting.peek()
            if seq is None or seq.last_step > self.committed:  # its tokens in flight are not known yet
                break
            sibling = self._sibling(seq)
            if sibling is not None and sibling.prompt_step >= builder.step:
                if not self._defer(seq):
                    break
                deferred.append(live.waiting.pop())
            elif not self._has_place(seq):
                if len(deferred) >= MOST_PASSED:
                    break
                deferred.append(live.waiting.pop())
            elif not (self._admit(seq) if sibling is None or live.config.has_states else self._fork(seq, sibling)):
                break
        for seq in deferred:
            live.waiting.push(seq, returned=True)

    def _has_place(self, seq: Seq) -> bool:
        """Whether `seq` can enter as far as adapters are concerned, its own and that of one before it."""
        places, step = self.live.adapters, self.builder.step
        if not places.has_room(seq):
            if not self._lacks_place:
                places.note_refused(seq, step)
            self._lacks_place = True
            return False
        return not self._lacks_place or places.may_pass(seq, step)

    def _sibling(self, seq: Seq) -> Seq | None:
        """The running sequence of the same request that has the most of the prompt, for a sample that has not begun."""
        if seq.request.params.n == 1 or len(seq.tokens) > seq.prompt_len:
            return None
        siblings = self.live.requests[seq.request.request_id]
        can_fork = self.live.cache.can_fork
        running = [other for other in siblings if other.state is SeqState.RUNNING and can_fork(seq, other)]
        return min(running, key=lambda other: other.prompt_step, default=None)

    def _pages_wanted(self, seq: Seq, n_shared: int, starts: list[int]) -> int:
        """Pages for the known tokens and one more, beside those from `starts` to `n_shared` of each table; preempted
        ones ask for slack, the pages that each running sequence takes next."""
        cache = self.live.cache
        needs = self.live.config.pages_of(min(len(seq.tokens) + 1, seq.limit))
        wanted = sum([max(0, need - n_shared + first) for need, first in zip(needs, starts, strict=True)])
        if seq.search is not None:
            wanted += seq.search.tail_pages(self.live.config)
        return wanted + (len(self.live.running) * cache.n_groups if seq.last_step >= 0 else 0)

    def _pages_of_fork(self, seq: Seq) -> int:
        """Pages wanted beside the full ones of the prompt that a sibling has."""
        cached = seq.prompt_len - 1
        return self._pages_wanted(seq, cached // self.live.config.page_size, self.live.cache.starts(cached))

    def _defer(self, seq: Seq) -> bool:
        """Set a slot and pages aside for a sample that can fork in the next step; False if they are not there."""
        wanted = self._pages_of_fork(seq)
        if wanted > self.live.cache.n_available - self.claimed_pages:
            return False
        self.claimed_pages += wanted
        self.claimed_slots += 1
        return True

    def _claim(self, search: BeamSearch) -> None:
        """Set aside what the beams of a search take once what they have in common is computed."""
        self.claimed_slots += search.n_lacking
        self.claimed_pages += search.tail_pages(self.live.config)

    def _admit(self, seq: Seq) -> bool:
        """Enter with what the tree has of its tokens, and a first chunk of the rest."""
        live, builder, config = self.live, self.builder, self.live.config
        n_slots = 1 if seq.search is None else seq.search.width
        if n_slots > 1 and n_slots > len(live.free_slots) - self.claimed_slots + self._unused_slots:
            return False
        cache = live.cache
        found = NO_MATCH if seq.needs_every_row else cache.match(seq, builder.step)
        if self._is_about_to_match(seq, found):
            return False
        cached = found.n_pages * config.page_size
        available = cache.n_available - found.n_unlocked - self.claimed_pages
        if self._pages_wanted(seq, found.n_pages, cache.starts(cached)) > available:
            return False
        live.waiting.pop()
        if seq.request.label and seq.n_admissions == 0 and cache.enabled:
            seq.miss = cache.tree.explain(cache.salt(seq), seq.tokens)
        cache.hold(seq, found)
        live.admit(seq, cached, [])
        seq.n_shared = found.n_shared
        length = min(len(seq.tokens) - cached, builder.budget, config.long_prefill_token_threshold or builder.budget)
        length = min(length, cache.n_fitting(seq, available))
        cache.grow(seq, config.pages_for(cached + length) - found.n_pages)
        builder.open(seq)
        if cache.snapshots is not None and cached:
            cache.snapshots.use(found.snapshot)
            builder.restore(seq, found.snapshot)
        builder.span(seq, length)
        cache.publish(seq)
        builder.save(cache, seq, cached)
        self.claimed_pages += cache.needed(seq.prefill_end, seq.tables, seq.held_from)
        if seq.search is not None:
            self._claim(seq.search)
        self.admitted.append(seq)
        return True

    def _is_about_to_match(self, seq: Seq, found: Match) -> bool:
        """Whether this very step takes a snapshot from which `seq` would go on further: in the next step it can."""
        snapshots = self.live.cache.snapshots
        if snapshots is None or not self.builder.plan.saves or found.n_shared <= found.n_pages:
            return False
        return self.live.cache.match(seq, self.builder.step + 1).n_pages > found.n_pages

    def _fork(self, seq: Seq, sibling: Seq) -> bool:
        """Enter beside a sibling whose prompt earlier steps compute.

        Share its full pages, copy the rows of the partial one (copy on write), recompute the last prompt token only.
        """
        live, builder, config = self.live, self.builder, self.live.config
        cached = seq.prompt_len - 1
        n_shared, n_rows = divmod(cached, config.page_size)
        if self._pages_of_fork(seq) > live.cache.n_available - self.claimed_pages:
            return False
        live.waiting.pop()
        live.cache.fork(seq, sibling, cached)
        sources = [table[n_shared] for table in sibling.tables] if n_rows else []
        live.admit(seq, cached, sources)
        for source, table in zip(sources, seq.tables, strict=False):
            builder.copy(source, table[n_shared], n_rows)
        builder.open(seq)
        builder.span(seq, 1)
        live.cache.publish(seq)
        self.admitted.append(seq)
        return True
