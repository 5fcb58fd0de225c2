"""Sequences that have not ended: the waiting queue, the running list and the slots; the ways in and out of them.

Owns membership and the counters of ends. Does not choose who moves (`admission.py`, `preemption.py`, `commit.py`).
Invariants: `running` is sorted by key, so the next victim of preemption is its last (of the data-parallel rank that
lacks pages); every live sequence is either waiting or running; a slot is free or held by one running sequence.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator

from quire.control.adapters import AdapterPlaces
from quire.control.beam_search import BeamSearch
from quire.control.cache import PageCache
from quire.control.config import SchedulerConfig
from quire.control.deadlines import Deadlines
from quire.control.draft_policy import DraftPolicy
from quire.control.history import History
from quire.control.queue import WaitQueue
from quire.control.seq import Seq, SeqState
from quire.control.slot_params import slot_params
from quire.core.events import FinishReason
from quire.core.request import Request

_key = operator.attrgetter("key")


class LiveSeqs:
    """See the module."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.caches = [PageCache(config) for _ in range(config.n_dp_ranks)]
        """The pages of each data-parallel rank."""
        self.cache = self.caches[0]
        """Of the first one, mostly the only one: what depends on the model alone is the same in all."""
        self.requests: dict[str, list[Seq]] = {}
        """Request id → all its sequences, while one of them is live; of a beam search the root alone."""
        self.searches: dict[str, BeamSearch] = {}
        """Request id → its beam search, while it is live."""
        self.waiting = WaitQueue()
        self.deadlines = Deadlines()
        self.running: list[Seq] = []
        self.adapters = AdapterPlaces(config.n_adapters, self.running)
        ends = range(config.max_num_seqs, config.n_slots + 1, config.max_num_seqs)
        self.free_slots = [list(range(end - 1, end - config.max_num_seqs - 1, -1)) for end in ends]
        """Of each data-parallel rank."""
        self.closed: list[int] = []
        """Slots left since the last plan."""
        self.closed_lens: list[int] = []
        """Tokens of the sequences that left them, of which nothing more comes; 0 for others."""
        self.finished = {reason.value: 0 for reason in FinishReason}
        self.n_submitted = 0
        self.preemptions = 0
        self.drafts = DraftPolicy(config.num_speculative_tokens, config.draft_costs, copies=config.drafts_copy)
        self.history: History | None = None
        self._arrivals = 0

    @classmethod
    def after(cls, failed: LiveSeqs) -> LiveSeqs:
        """No sequences, and counters that go on where `failed` stood; sequences whose end it had not counted failed.

        Every slot is closed, whatever compute knows.
        """
        live = cls(failed.config)
        live.closed = list(range(failed.config.n_slots))
        live.closed_lens = [0] * len(live.closed)
        live.finished = dict(failed.finished)
        live.n_submitted, live.preemptions = failed.n_submitted, failed.preemptions
        live.finished[FinishReason.ERROR.value] += failed.n_submitted - sum(failed.finished.values())
        live._arrivals, live.history, live.drafts = failed._arrivals, failed.history, failed.drafts
        return live

    @classmethod
    def again(cls, failed: LiveSeqs) -> LiveSeqs:
        """Every live sequence of `failed` waits, without pages; the counters go on."""
        live = cls(failed.config)
        live.closed = list(range(failed.config.n_slots))
        live.closed_lens = [0] * len(live.closed)
        live.finished, live.n_submitted = dict(failed.finished), failed.n_submitted
        live.preemptions = failed.preemptions + len(failed.running)
        live.history, live.drafts = failed.history, failed.drafts
        live._arrivals, live.deadlines, live.requests = failed._arrivals, failed.deadlines, failed.requests
        live.searches = failed.searches
        for search in failed.searches.values():
            for member in search.members[1:]:
                member.change(SeqState.ENDED)
            search.fold()
        for seqs in failed.requests.values():
            for seq in seqs:
                if seq.state is not SeqState.ENDED:
                    seq.requeue()
                    live.waiting.push(seq, returned=seq.n_admissions > 0)
        return live

    def add(self, request: Request) -> None:
        """Put the request's sequences into the queue, behind all of its priority."""
        priority = request.priority if self.config.policy == "priority" else 0
        self._arrivals += 1
        seqs = [
            Seq(request, index, (priority, self._arrivals, index), slot_params(request, index))
            for index in range(1 if request.beams is not None else request.params.n)
        ]
        if request.beams is not None:
            seqs[0].search = self.searches[request.request_id] = BeamSearch(seqs[0])
        self.requests[request.request_id] = seqs
        self.n_submitted += len(seqs)
        for seq in seqs:
            self.waiting.push(seq)

    def admit(self, seq: Seq, cached: int, copied_pages: list[int]) -> None:
        """WAITING → RUNNING with the pages it has, of which the first `cached` tokens hold K/V; it was popped."""
        seq.enter(self.free_slots[seq.dp_rank].pop(), cached, copied_pages)
        self.drafts.none_before = 0
        bisect.insort(self.running, seq, key=_key)

    def n_running(self, dp_rank: int) -> int:
        """Sequences that run on a data-parallel rank."""
        return self.config.max_num_seqs - len(self.free_slots[dp_rank])

    def last_running(self, dp_rank: int) -> Seq:
        """Of those on a data-parallel rank, which has some, the one with the largest key."""
        return next(seq for seq in reversed(self.running) if seq.dp_rank == dp_rank)

    def still_running(self) -> Iterator[Seq]:
        """In key order, without those that leave meanwhile, wherever they stand, and with those that come behind."""
        running, at = self.running, 0
        while at < len(running):
            seq = running[at]
            yield seq
            stays = at < len(running) and running[at] is seq
            at = at + 1 if stays else bisect.bisect_right(running, seq.key, key=_key)

    def preempt(self, seq: Seq, *, trusted: bool = True) -> None:
        """RUNNING → WAITING, in front of later arrivals.

        trusted: its full pages stay in the tree and its results in flight still count; otherwise both are dropped.
        With one member of a beam search all go, and its results in flight never count.
        """
        search = seq.search
        if search is not None:
            seq = search.root
            self._drop_members(search, trusted)
        self._vacate(seq, SeqState.WAITING, trusted)
        if search is not None:
            seq.ignore_through = seq.last_step
            search.fold()
        self.waiting.push(seq, returned=True)
        self.preemptions += 1

    def end(self, seq: Seq, reason: FinishReason, *, trusted: bool = True) -> None:
        """RUNNING or WAITING → ENDED. Nothing follows for it; the request goes with its last sequence.

        With one member of a beam search all end, and count as one sequence.
        """
        if seq.search is not None:
            seq = self.searches.pop(seq.request.request_id).root
            self._drop_members(seq.search, trusted)
        if seq.state is SeqState.RUNNING:
            self._vacate(seq, SeqState.ENDED, trusted)
            self.waiting.charge(seq)
        else:
            seq.change(SeqState.ENDED)
            self.waiting.forget()
        seq.ignore_through = max(seq.ignore_through, seq.last_step)
        self.finished[reason.value] += 1
        siblings = self.requests[seq.request.request_id]
        if all(sibling.state is SeqState.ENDED for sibling in siblings):
            del self.requests[seq.request.request_id]
            if self.history is not None:
                self.history.end(siblings, reason.value)

    def new_member(self, search: BeamSearch) -> Seq:
        """One more sequence for a beam search, to be admitted."""
        root = search.root
        member = Seq(root.request, 0, (*root.key[:2], len(search.members)), root.params)
        member.search, member.prompt_rows, member.dp_rank = search, None, root.dp_rank
        search.members.append(member)
        return member

    def reopen(self, member: Seq) -> None:
        """The slot of a member is opened anew by the plan that is being written."""
        self.closed.append(member.slot)
        self.closed_lens.append(0)

    def _drop_members(self, search: BeamSearch | None, trusted: bool) -> None:
        """End all members of a beam search but its root, uncounted."""
        if search is None:
            return
        for member in search.members[1:]:
            self._vacate(member, SeqState.ENDED, trusted)
            member.ignore_through = max(member.ignore_through, member.last_step)
        del search.members[1:]

    def _vacate(self, seq: Seq, state: SeqState, trusted: bool) -> None:
        del self.running[bisect.bisect_left(self.running, seq.key, key=_key)]
        self.free_slots[seq.dp_rank].append(seq.slot)
        self.closed.append(seq.slot)
        self.closed_lens.append(len(seq.tokens) if state is SeqState.ENDED and trusted else 0)
        if not trusted:
            seq.ignore_through = seq.last_step
        self.caches[seq.dp_rank].release(seq, keep=trusted)
        seq.leave(state)
