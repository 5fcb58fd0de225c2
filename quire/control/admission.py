"""Who enters: waiting sequences in queue order, in chunks, with the tokens, slots and pages that running ones leave.

A sequence is admitted when pages for all its known tokens and one more are available beyond what running prompts still
need; it then takes only those of its first chunk. Check, then act: a refused one holds nothing and changes nothing.
Order is strict (the first that does not fit stops admission), with two stated exceptions: a parallel sample whose
sibling is computing their prompt waits for the next step, with a slot and pages set aside, and lets others pass; so
does, for some time, one for whose adapter there is no place (`adapters.py`).
Samples of a model with recurrent states do not fork: they enter like any prompt that begins as another did.
Of several data-parallel ranks a sequence enters one that has the most of its prompt in its tree, as long as not many
more run there than elsewhere (`MOST_AHEAD`); of such the one where the fewest run. Samples stay with their sibling
while there is room.
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
MOST_AHEAD = 8
"""Sequences that a data-parallel rank may run beyond the one with the fewest, and still be chosen for what its tree
has. Without a bound a prefix that all requests share would bring all of them to one rank, and a step takes as long as
its fullest rank; with one every rank has computed such a prefix soon."""


def with_room(live: LiveSeqs, builder: PlanBuilder) -> list[int]:
    """Data-parallel ranks where somebody might enter in this step."""
    return [
        dp_rank
        for dp_rank, free in enumerate(live.free_slots)
        if free and builder.budgets[dp_rank] > 0 and dp_rank not in builder.tight
    ]


class Admission:
    """One step's admissions.

    committed: the last step whose result has come; prompts: sequences that had prompt left and ran before it; dp_ranks:
    those `with_room`; n_seqs: most sequences that may run on one, if not as many as there are slots.
    """

    def __init__(
        self,
        live: LiveSeqs,
        builder: PlanBuilder,
        committed: int,
        prompts: list[Seq],
        dp_ranks: list[int],
        n_seqs: int | None = None,
    ) -> None:
        self.live = live
        self.builder = builder
        self.committed = committed
        self.admitted: list[Seq] = []
        self.claimed_pages = [0] * live.config.n_dp_ranks
        """Pages that running prompts and deferred siblings will take soon, of each data-parallel rank."""
        for seq in [one for one in prompts if one.state is SeqState.RUNNING]:  # others were preempted in this step
            self.claimed_pages[seq.dp_rank] += live.cache.needed(seq.prefill_end, seq.tables, seq.held_from)
        self._dp_ranks = dp_ranks
        self._lacks_place = False
        """A sequence before the next one waits for a place of its adapter."""
        self._unused_slots = 0 if n_seqs is None else live.config.max_num_seqs - n_seqs
        self.claimed_slots = [self._unused_slots] * live.config.n_dp_ranks
        for search in live.searches.values():
            if search.root.state is SeqState.RUNNING and search.n_lacking:
                self._claim(search)

    def run(self) -> None:
        """Admit until tokens, slots or pages run out or the queue's head must wait."""
        live, builder = self.live, self.builder
        deferred: list[Seq] = []
        while any(map(self._has_room, self._dp_ranks)):
            seq = live.waiting.peek()
            if seq is None or seq.last_step > self.committed:  # its tokens in flight are not known yet
                break
            sibling = self._sibling(seq)
            if sibling is not None and sibling.prompt_step >= builder.step:
                if self._defer(seq, sibling):
                    deferred.append(live.waiting.pop())
                elif not self._admit_elsewhere(seq):
                    break
            elif not self._has_place(seq):
                if len(deferred) >= MOST_PASSED:
                    break
                deferred.append(live.waiting.pop())
            elif sibling is None or live.config.has_states:
                if not self._admit(seq):
                    break
            elif not (self._fork(seq, sibling) or self._admit_elsewhere(seq)):
                break
        for seq in deferred:
            live.waiting.push(seq, returned=True)

    def _has_room(self, dp_rank: int) -> bool:
        """Whether a sequence without a claim may have a slot and tokens there."""
        n_free = len(self.live.free_slots[dp_rank]) - self.claimed_slots[dp_rank]
        return self.builder.budgets[dp_rank] > 0 and n_free > 0

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
        """The running sequence of the same request that has the most of the prompt, for a sample that has not begun and
        does not have to compute all of it."""
        if seq.request.params.n == 1 or len(seq.tokens) > seq.prompt_len or seq.needs_every_row:
            return None
        siblings = self.live.requests[seq.request.request_id]
        can_fork = self.live.cache.can_fork
        running = [other for other in siblings if other.state is SeqState.RUNNING and can_fork(seq, other)]
        return min(running, key=lambda other: other.prompt_step, default=None)

    def _pages_wanted(self, seq: Seq, n_shared: int, starts: list[int], dp_rank: int) -> int:
        """Pages for the known tokens and one more, beside those from `starts` to `n_shared` of each table; preempted
        ones ask for slack, the pages that each sequence running there takes next."""
        cache = self.live.cache
        needs = self.live.config.pages_of(min(len(seq.tokens) + 1, seq.limit))
        wanted = sum([max(0, need - n_shared + first) for need, first in zip(needs, starts, strict=True)])
        if seq.search is not None:
            wanted += seq.search.tail_pages(self.live.config)
        return wanted + (self.live.n_running(dp_rank) * cache.n_groups if seq.last_step >= 0 else 0)

    def _n_available(self, dp_rank: int) -> int:
        """Pages beyond those that are claimed."""
        return self.live.caches[dp_rank].n_available - self.claimed_pages[dp_rank]

    def _fits_beside(self, seq: Seq, sibling: Seq) -> int | None:
        """Pages wanted beside the full ones of the prompt that a sibling has; None if they, or a slot, lack there."""
        cached, dp_rank = seq.prompt_len - 1, sibling.dp_rank
        if dp_rank not in self._dp_ranks or not self._has_room(dp_rank):
            return None
        starts = self.live.cache.starts(cached)
        wanted = self._pages_wanted(seq, cached // self.live.config.page_size, starts, dp_rank)
        return wanted if wanted <= self._n_available(dp_rank) else None

    def _defer(self, seq: Seq, sibling: Seq) -> bool:
        """Set a slot and pages aside for a sample that can fork in the next step; False if they are not there."""
        wanted = self._fits_beside(seq, sibling)
        if wanted is None:
            return False
        self.claimed_pages[sibling.dp_rank] += wanted
        self.claimed_slots[sibling.dp_rank] += 1
        return True

    def _claim(self, search: BeamSearch) -> None:
        """Set aside what the beams of a search take once what they have in common is computed."""
        dp_rank = search.root.dp_rank
        self.claimed_slots[dp_rank] += search.n_lacking
        self.claimed_pages[dp_rank] += search.tail_pages(self.live.config)

    def _admit(self, seq: Seq) -> bool:
        """Enter with what a tree has of its tokens, and a first chunk of the rest, on the best rank with room."""
        for dp_rank, found in self._matches(seq):
            if self._is_about_to_match(seq, found, dp_rank):
                return False
            if self._fits(seq, found, dp_rank):
                self._enter(seq, found, dp_rank)
                return True
        return False

    def _admit_elsewhere(self, seq: Seq) -> bool:
        """A sample for which there is no room beside its sibling enters another rank, like any prompt."""
        return len(self.live.caches) > 1 and self._admit(seq)

    def _matches(self, seq: Seq) -> list[tuple[int, Match]]:
        """Data-parallel ranks with a slot for it, and what their trees have; the best first."""
        n_slots, live = 1 if seq.search is None else seq.search.width, self.live
        dp_ranks = [dp_rank for dp_rank in self._dp_ranks if self._has_room(dp_rank)]
        if n_slots > 1:
            n_free = {one: len(live.free_slots[one]) - self.claimed_slots[one] + self._unused_slots for one in dp_ranks}
            dp_ranks = [dp_rank for dp_rank in dp_ranks if n_slots <= n_free[dp_rank]]
        step = self.builder.step
        found = [(one, NO_MATCH if seq.needs_every_row else live.caches[one].match(seq, step)) for one in dp_ranks]
        if len(found) > 1:
            fewest = min(map(live.n_running, dp_ranks))
            found.sort(key=lambda pair: self._rank_key(pair[0], pair[1], fewest))
        return found

    def _rank_key(self, dp_rank: int, found: Match, fewest: int) -> tuple[bool, int, int, int]:
        """Smallest for the best. fewest: sequences that run on the rank with the fewest."""
        n_running = self.live.n_running(dp_rank)
        return n_running > fewest + MOST_AHEAD, -found.n_pages, n_running, -self._n_available(dp_rank)

    def _fits(self, seq: Seq, found: Match, dp_rank: int) -> bool:
        """Whether its pages are there."""
        starts = self.live.cache.starts(found.n_pages * self.live.config.page_size)
        available = self._n_available(dp_rank) - found.n_unlocked
        return self._pages_wanted(seq, found.n_pages, starts, dp_rank) <= available

    def _enter(self, seq: Seq, found: Match, dp_rank: int) -> None:
        live, builder, config, cache = self.live, self.builder, self.live.config, self.live.caches[dp_rank]
        cached, budget = found.n_pages * config.page_size, builder.budgets[dp_rank]
        available = self._n_available(dp_rank) - found.n_unlocked
        live.waiting.pop()
        seq.dp_rank = dp_rank
        if seq.request.label and seq.n_admissions == 0 and cache.enabled:
            seq.miss = cache.tree.explain(cache.salt(seq), seq.tokens)
        cache.hold(seq, found)
        live.admit(seq, cached, [])
        seq.n_shared = found.n_shared
        length = min(len(seq.tokens) - cached, budget, config.long_prefill_token_threshold or budget)
        length = min(length, cache.n_fitting(seq, available))
        cache.grow(seq, config.pages_for(cached + length) - found.n_pages)
        builder.open(seq)
        if cache.snapshots is not None and cached:
            cache.snapshots.use(found.snapshot)
            builder.restore(seq, found.snapshot)
        builder.span(seq, length)
        cache.publish(seq)
        builder.save(cache, seq, cached)
        self.claimed_pages[dp_rank] += cache.needed(seq.prefill_end, seq.tables, seq.held_from)
        if seq.search is not None:
            self._claim(seq.search)
        self.admitted.append(seq)

    def _is_about_to_match(self, seq: Seq, found: Match, dp_rank: int) -> bool:
        """Whether this very step takes a snapshot from which `seq` would go on further: in the next step it can."""
        cache = self.live.caches[dp_rank]
        if cache.snapshots is None or not self.builder.plan.saves or found.n_shared <= found.n_pages:
            return False
        return cache.match(seq, self.builder.step + 1).n_pages > found.n_pages

    def _fork(self, seq: Seq, sibling: Seq) -> bool:
        """Enter beside a sibling whose prompt earlier steps compute.

        Share its full pages, copy the rows of the partial one (copy on write), recompute the last prompt token only.
        """
        live, builder, config = self.live, self.builder, self.live.config
        cached = seq.prompt_len - 1
        n_shared, n_rows = divmod(cached, config.page_size)
        if self._fits_beside(seq, sibling) is None:
            return False
        live.waiting.pop()
        seq.dp_rank, cache = sibling.dp_rank, live.caches[sibling.dp_rank]
        cache.fork(seq, sibling, cached)
        sources = [table[n_shared] for table in sibling.tables] if n_rows else []
        live.admit(seq, cached, sources)
        for source, table in zip(sources, seq.tables, strict=False):
            builder.copy(seq, source, table[n_shared], n_rows)
        builder.open(seq)
        builder.span(seq, 1)
        cache.publish(seq)
        self.admitted.append(seq)
        return True
