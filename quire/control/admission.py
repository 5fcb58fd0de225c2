"""Who enters: waiting sequences in queue order, in chunks, with the tokens, slots and pages that running ones leave.

A sequence is admitted when pages for all its known tokens and one more are available beyond what running prompts still
need; it then takes only those of its first chunk. Check, then act: a refused one holds nothing and changes nothing.
Order is strict (the first that does not fit stops admission), with one stated exception: a parallel sample whose
sibling is computing their prompt waits for the next step, with a slot and pages set aside, and lets others pass.
"""

from __future__ import annotations

from quire.control.cache import NO_MATCH
from quire.control.draft import StepDraft
from quire.control.roster import Roster
from quire.control.seq import Seq, SeqState


class Admission:
    """One step's admissions.

    committed: the last step whose result has come; prompts: the running sequences that have prompt left; n_seqs: most
    sequences that may run, if not as many as there are slots.
    """

    def __init__(
        self, roster: Roster, draft: StepDraft, committed: int, prompts: list[Seq], n_seqs: int | None = None
    ) -> None:
        self.roster = roster
        self.draft = draft
        self.committed = committed
        self.admitted: list[Seq] = []
        self.claimed_pages = sum([roster.cache.needed(seq.prefill_end, seq.tables, seq.held_from) for seq in prompts])
        """Pages that running prompts and deferred siblings will take soon."""
        self.claimed_slots = 0 if n_seqs is None else roster.config.max_num_seqs - n_seqs

    def run(self) -> None:
        """Admit until tokens, slots or pages run out or the queue's head must wait."""
        roster, draft = self.roster, self.draft
        deferred: list[Seq] = []
        while draft.budget > 0 and len(roster.free_slots) > self.claimed_slots:
            seq = roster.waiting.peek()
            if seq is None or seq.last_step > self.committed:  # its tokens in flight are not known yet
                break
            sibling = self._sibling(seq)
            if sibling is not None and sibling.prompt_step >= draft.step:
                if not self._defer(seq):
                    break
                deferred.append(roster.waiting.pop())
            elif not (self._admit(seq) if sibling is None else self._fork(seq, sibling)):
                break
        for seq in deferred:
            roster.waiting.push(seq, returned=True)

    def _sibling(self, seq: Seq) -> Seq | None:
        """The running sequence of the same request that has the most of the prompt, for a sample that has not begun."""
        if seq.request.params.n == 1 or len(seq.tokens) > seq.prompt_len:
            return None
        siblings = self.roster.requests[seq.request.request_id]
        can_fork = self.roster.cache.can_fork
        running = [other for other in siblings if other.state is SeqState.RUNNING and can_fork(seq, other)]
        return min(running, key=lambda other: other.prompt_step, default=None)

    def _pages_wanted(self, seq: Seq, n_shared: int, starts: list[int]) -> int:
        """Pages for the known tokens and one more, beside those from `starts` to `n_shared` of each table; preempted
        ones ask for slack, the pages that each running sequence takes next."""
        cache = self.roster.cache
        needs = self.roster.config.pages_of(min(len(seq.tokens) + 1, seq.limit))
        wanted = sum([max(0, need - n_shared + first) for need, first in zip(needs, starts, strict=True)])
        return wanted + (len(self.roster.running) * cache.n_groups if seq.last_step >= 0 else 0)

    def _pages_of_fork(self, seq: Seq) -> int:
        """Pages wanted beside the full ones of the prompt that a sibling has."""
        cached = seq.prompt_len - 1
        return self._pages_wanted(seq, cached // self.roster.config.page_size, self.roster.cache.starts(cached))

    def _defer(self, seq: Seq) -> bool:
        """Set a slot and pages aside for a sample that can fork in the next step; False if they are not there."""
        wanted = self._pages_of_fork(seq)
        if wanted > self.roster.cache.n_available - self.claimed_pages:
            return False
        self.claimed_pages += wanted
        self.claimed_slots += 1
        return True

    def _admit(self, seq: Seq) -> bool:
        """Enter with what the tree has of its tokens, and a first chunk of the rest."""
        roster, draft, config = self.roster, self.draft, self.roster.config
        cache = roster.cache
        found = NO_MATCH if seq.needs_every_row else cache.match(seq)
        cached = found.n_pages * config.page_size
        available = cache.n_available - found.n_unlocked - self.claimed_pages
        if self._pages_wanted(seq, found.n_pages, cache.starts(cached)) > available:
            return False
        roster.waiting.pop()
        if seq.request.label and seq.n_admissions == 0 and cache.enabled:
            seq.miss = cache.tree.explain(seq.request.cache_salt, seq.tokens)
        cache.hold(seq, found)
        roster.admit(seq, cached, [])
        length = min(len(seq.tokens) - cached, draft.budget, config.long_prefill_token_threshold or draft.budget)
        length = min(length, cache.n_fitting(seq, available))
        cache.grow(seq, config.pages_for(cached + length) - found.n_pages)
        draft.open(seq)
        draft.span(seq, length)
        cache.publish(seq)
        self.claimed_pages += cache.needed(seq.prefill_end, seq.tables, seq.held_from)
        self.admitted.append(seq)
        return True

    def _fork(self, seq: Seq, sibling: Seq) -> bool:
        """Enter beside a sibling whose prompt earlier steps compute.

        Share its full pages, copy the rows of the partial one (copy on write), recompute the last prompt token only.
        """
        roster, draft, config = self.roster, self.draft, self.roster.config
        cached = seq.prompt_len - 1
        n_shared, n_rows = divmod(cached, config.page_size)
        if self._pages_of_fork(seq) > roster.cache.n_available - self.claimed_pages:
            return False
        roster.waiting.pop()
        roster.cache.fork(seq, sibling, n_shared)
        sources = [table[n_shared] for table in sibling.tables] if n_rows else []
        roster.admit(seq, cached, sources)
        for source, table in zip(sources, seq.tables, strict=False):
            draft.copy(source, table[n_shared], n_rows)
        draft.open(seq)
        draft.span(seq, 1)
        roster.cache.publish(seq)
        self.admitted.append(seq)
        return True
