"""`Scheduler`: decides each step and reads its result. The facade of control; the engine's loop calls nothing else.

Order of a step: one token for every decoding sequence, then the next chunk of running prompts, then admissions, all
within one token budget, and beside decodes within `Pace`, so that no prompt stalls one (Agrawal et al. 2024,
"Sarathi-Serve", section 4).
Plans are made before earlier results have come, up to `pipeline_depth` in flight: a decode span needs no token value.
Invariant: nothing here waits, and every plan makes progress for the sequence that is first in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from quire.control.admission import Admission, with_room
from quire.control.backoff import Backoff
from quire.control.beam_search import check_beams
from quire.control.commit import commit_step, verify
from quire.control.config import SchedulerConfig
from quire.control.drafting import choose_drafts, plan_with_drafts
from quire.control.faults import end_faulted
from quire.control.forking import place_beams
from quire.control.gauges import Counters, page_map, read_stats, tree_shape
from quire.control.history import History
from quire.control.live_seqs import LiveSeqs
from quire.control.micro_batches import micro_batch
from quire.control.pacing import keep_pace
from quire.control.plan_builder import PlanBuilder
from quire.control.preemption import fit_chunk, make_room
from quire.control.seen_costs import StepKind
from quire.control.seq import Seq, SeqState
from quire.control.sharing import shared_prefixes
from quire.core.clock import Clock
from quire.core.errors import (
    ContextLengthExceeded,
    EngineError,
    InvalidParameter,
    QueueFull,
    RequestError,
)
from quire.core.events import EngineStats, FinishReason, SeqDelta
from quire.core.failure import Code, Failure
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.result import StepResult

TOO_LATE = {
    Code.QUEUE_TIMEOUT: "the request waited longer for its turn than the server allows: try again later",
    Code.REQUEST_TIMEOUT: "the request took longer than the server allows",
}
NO_MEMORY = Failure(Code.DEVICE_OUT_OF_MEMORY, "the device has not enough memory to compute this sequence, even alone")


class Scheduler:
    """See the module. Not thread-safe: one loop owns it."""

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.live = LiveSeqs(config)
        self.in_flight: deque[PlanBuilder] = deque()
        """Plans whose results have not come, oldest first."""
        self.backoff = Backoff(config.max_num_seqs, config.max_num_batched_tokens)
        self.counters = Counters(progress_s=clock.now_s())
        self.history = self.live.history = History(clock)
        self._n_drafting = 0
        """Spans in flight that verify drafts."""
        self._ended_s = 0.0
        """When the newest committed step had been computed."""
        self._next_step = 0
        self._abandoned = -1
        self._gained: list[SeqDelta] = []
        """Deltas of the step that is being committed: they are still delivered if it fails half-way."""

    def submit(self, request: Request) -> None:
        """Queue a request. RequestError (ContextLengthExceeded, QueueFull, ...) if refused; then nothing changed."""
        self._verify(request)
        if not self.has_work():
            self.counters.progress_s = self.clock.now_s()
        self.history.arrive(request, len(self.live.waiting))
        self.live.add(request)
        if request.terms.queue_limit_s or request.terms.time_limit_s:
            for seq in self.live.requests[request.request_id]:
                self.live.deadlines.add(seq, self.clock.now_s())

    def expire(self) -> list[SeqDelta]:
        """End the sequences whose time is over, waiting or running; returns their ends."""
        deltas: list[SeqDelta] = []
        if not self.live.deadlines:
            return deltas
        for seq, code in self.live.deadlines.due(self.clock.now_s()):
            failure = Failure(code, TOO_LATE[code])
            deltas.append(SeqDelta(seq.request.request_id, seq.index, [], FinishReason.ERROR, failure=failure))
            self.live.end(seq, FinishReason.ERROR)
        return deltas

    def _verify(self, request: Request) -> None:
        config, n = self.config, request.params.n
        prompt_len, max_tokens = len(request.prompt_token_ids), request.max_tokens
        if request.request_id in self.live.requests:
            raise RequestError("a request with this id is queued or running already", code=Code.DUPLICATE_REQUEST_ID)
        if prompt_len == 0:
            raise InvalidParameter("prompt_token_ids", [], "a list of at least one token id")
        if max_tokens < 1:
            raise InvalidParameter("max_tokens", max_tokens, "at least 1")
        if prompt_len + max_tokens > config.max_model_len:
            raise ContextLengthExceeded(
                f"prompt ({prompt_len}) plus output ({max_tokens}) is {prompt_len + max_tokens} tokens, "
                f"the context holds {config.max_model_len}: shorten the prompt or lower max_tokens"
            )
        if request.beams is not None:
            check_beams(config, request)
        n_pages = sum(config.pages_of(prompt_len + max_tokens - 1))
        if n_pages > config.n_usable_pages:
            raise ContextLengthExceeded(
                f"prompt ({prompt_len}) plus output ({max_tokens}) need {n_pages} KV pages, the pool has "
                f"{config.n_usable_pages}: shorten the prompt, lower max_tokens or give the pool more memory"
            )
        most, n_running, n_waiting = config.max_num_live, len(self.live.running), len(self.live.waiting)
        if n > most:
            limit = f"at most {most}, {config.n_slots} that run and {config.max_num_waiting} that wait"
            hint = "Ask for fewer; the operator can raise --max-num-seqs or --max-num-waiting."
            raise InvalidParameter("n", n, limit, hint)
        if n_running + n_waiting + n > most:
            raise QueueFull(
                f"{n_running} sequences run and {n_waiting} wait: {n} more exceed {config.n_slots} slots and"
                f" {config.max_num_waiting} that may wait: try again later"
            )

    def cancel(self, request_id: str) -> None:
        """End a request now, in any state; unknown or ended ids are ignored. No delta follows for it."""
        for seq in list(self.live.requests.get(request_id, ())):
            if seq.state is not SeqState.ENDED:
                self.live.end(seq, FinishReason.ABORT)

    def cancel_seq(self, request_id: str, index: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End one sequence of a request (its stop string was seen), if it is live. No delta follows for it."""
        seqs = self.live.requests.get(request_id, [])
        if 0 <= index < len(seqs) and seqs[index].state is not SeqState.ENDED:
            self.live.end(seqs[index], reason)

    def schedule(self) -> StepPlan | None:
        """The next step, to be executed after all earlier ones; None when nothing can be planned now."""
        live, n_waiting = self.live, len(self.live.waiting)
        if len(self.in_flight) >= self.config.pipeline_depth or not (live.running or n_waiting):
            return None
        if len(self.in_flight) > 1 and self.in_flight[-1].plan.masked:
            return None  # its masks come when the steps before it are committed, and the next plan after them
        committed, n_free = self._next_step - len(self.in_flight) - 1, self.backoff.n_tokens
        now_s, n_dp_ranks = self.clock.now_s(), self.config.n_dp_ranks
        builder = PlanBuilder(self._next_step, n_free, now_s, committed, live.adapters, n_dp_ranks)
        drafts = choose_drafts(live, builder)
        prompts = plan_with_drafts(live, builder, drafts) if drafts else _plan_decodes(live, builder)
        n_decodes = len(builder.seqs)
        if live.cache.snapshots is not None:
            _save_decodes(live, builder)
        if n_decodes and (prompts or n_waiting):
            keep_pace(live, builder, prompts, self.backoff.n_seqs)
        if prompts:
            _plan_prompts(live, builder, prompts)
        if n_waiting and (dp_ranks := with_room(live, builder)):
            admission = Admission(live, builder, committed, prompts, dp_ranks, self.backoff.n_seqs)
            admission.run()
            self.counters.count_admissions(admission.admitted)
            self.history.admit(admission.admitted)
        if not builder.seqs:
            return None
        if len(builder.seqs) > n_decodes:
            self.history.chunk(builder, n_decodes)
        plan = builder.plan
        plan.n_tokens = sum(plan.spans.lengths)
        plan.knows_starts = not self._n_drafting
        if drafts:
            builder.n_drafting = len(plan.spans) - plan.spans.n_drafts.count(0)
            self._n_drafting += builder.n_drafting
        plan.closed, live.closed = live.closed, []
        plan.closed_lens, live.closed_lens = live.closed_lens, []
        if self.config.min_shared_tokens and live.cache.n_full:
            _note_shared(live, plan, builder.seqs[:n_decodes])
        self.in_flight.append(builder)
        self._next_step += 1
        return plan

    def commit(self, result: StepResult) -> list[SeqDelta]:
        """Take the result of the oldest step in flight (EngineError if of another); returns what sequences gained."""
        if result.step <= self._abandoned:
            return []
        if not self.in_flight or self.in_flight[0].step != result.step:
            expected = self.in_flight[0].step if self.in_flight else "none"
            raise EngineError(f"a result of step {result.step} came, expected was {expected}")
        builder = self.in_flight[0]
        verify(builder, result)
        if result.faults:
            end_faulted(self.live, self.in_flight, result, self._gained)
        commit_step(self.live, builder, result, self._gained)
        self.in_flight.popleft()
        self._n_drafting -= builder.n_drafting
        now_s = self.clock.now_s()
        if self.live.drafts.most:
            ended_s = result.timings.ended_s or now_s
            if self.live.drafts.times(builder.step):
                self._time(builder, result, ended_s - max(builder.scheduled_s, self._ended_s))
            self._ended_s = ended_s
        deltas, self._gained = self._gained, []
        self.backoff.count_step()
        self.history.step(builder, deltas)
        self.counters.count_step(builder.plan.n_tokens, deltas, now_s)
        return deltas

    def _time(self, builder: PlanBuilder, result: StepResult, seconds: float) -> None:
        """A step took so long; one with prompts says nothing of what its kind costs."""
        n_seqs = len(builder.seqs)
        if builder.plan.n_tokens - sum(builder.plan.spans.n_drafts) == n_seqs:
            kind = StepKind.PLAIN if builder.plan.knows_starts else StepKind.BEHIND
            n_right = sum([n - 1 for n in result.n_new if n]) if builder.n_drafting else 0
            kind = StepKind.DRAFTED if builder.n_drafting else kind
            self.live.drafts.time(builder.step, n_seqs, result.n_drafted, n_right, seconds, kind)

    def fail_all(self, failure: Failure) -> list[SeqDelta]:
        """End everything with an error; forget the steps in flight (late results are ignored) and every cached page.

        Works from any state, also one that an exception left half-changed: what was is only read, and replaced.
        Returns what a commit that failed half-way had gathered, then one error for each sequence without an end.
        """
        old, deltas, self._gained = self.live, self._gained, []
        self.counters.count_tokens(deltas)
        told = {(delta.request_id, delta.index) for delta in deltas if delta.finish_reason is not None}
        unended = [seq for seqs in old.requests.values() for seq in seqs if seq.state is not SeqState.ENDED]
        for name in [(seq.request.request_id, seq.index) for seq in unended]:
            if name not in told:
                deltas.append(SeqDelta(*name, [], FinishReason.ERROR, failure=failure))
        for seqs in old.requests.values():
            self.history.end(seqs, FinishReason.ERROR.value)
        self.live = LiveSeqs.after(old)
        self.in_flight.clear()
        self._n_drafting = 0
        self._abandoned = self._next_step - 1
        return deltas

    def retry_all(self) -> list[SeqDelta]:
        """The oldest step in flight found too little memory: nothing of it or of later ones counts.

        Every live sequence computes again, from its known tokens, in smaller steps. When steps cannot be smaller, those
        that were in this one end with an error, which is returned.
        """
        old = self.live
        deltas: list[SeqDelta] = []
        if not self.backoff.halve() and self.in_flight:
            for seq in self.in_flight[0].seqs:
                if seq.state is not SeqState.ENDED:
                    name = seq.request.request_id, seq.index
                    deltas.append(SeqDelta(*name, [], FinishReason.ERROR, failure=NO_MEMORY))
                    old.end(seq, FinishReason.ERROR, trusted=False)
        self.live = LiveSeqs.again(old)
        self.in_flight.clear()
        self._n_drafting = 0
        self._abandoned = self._next_step - 1
        return deltas

    def forget_prefixes(self) -> bool:
        """Free the cached pages that no sequence holds; True if none are left."""
        are_empty = [cache.forget() for cache in self.live.caches]
        return all(are_empty)

    def has_work(self) -> bool:
        """True while a sequence waits or runs, or a result is outstanding."""
        return bool(self.live.requests or self.in_flight)

    def stats(self, *, with_map: bool = True) -> EngineStats:
        """Gauges and counters. The page map costs time in proportion to the pages held; without it it is empty."""
        age_s = self.clock.now_s() - self.counters.progress_s if self.has_work() else 0.0
        stats = read_stats(self.live, self.counters, len(self.in_flight), age_s)
        if with_map:
            stats.page_map, stats.tree = page_map(self.live), tree_shape(*(cache.tree for cache in self.live.caches))
        return stats


def _plan_decodes(live: LiveSeqs, builder: PlanBuilder) -> list[Seq]:
    """One token for each running sequence whose known tokens are all planned; returns the others. The hot loop."""
    prompts: list[Seq] = []
    spans, seqs, step = builder.plan.spans, builder.seqs, builder.step
    slots, starts, masked, searches = spans.slots, spans.starts, builder.plan.masked, live.searches
    for seq in _whose_turn(live, builder):  # in key order
        if searches and seq.search is not None and seq.search.is_ready and not place_beams(live, builder, seq.search):
            continue
        start = seq.planned
        if start < seq.prefill_end:
            prompts.append(seq)
        elif start < seq.limit and (start < seq.room or make_room(live, builder, seq)):
            seq.planned = start + 1
            seq.last_step = step
            if seq.is_masked:
                masked.append(len(seqs))
            slots.append(seq.slot)
            starts.append(start)
            seqs.append(seq)
    n = len(seqs)
    spans.lengths, spans.n_drafts, spans.wants = [1] * n, [0] * n, [True] * n
    if len(builder.budgets) == 1:
        builder.budgets[0] -= n
    else:
        for seq in seqs:
            builder.budgets[seq.dp_rank] -= 1
    return prompts


def _whose_turn(live: LiveSeqs, builder: PlanBuilder) -> Iterable[Seq]:
    """Running sequences that this step may take, without those that give way meanwhile."""
    if live.config.n_stages > 1:
        return micro_batch(live, builder.step, builder.committed)
    if live.config.n_dp_ranks > 1:
        return live.still_running()
    return live.running  # preemption shortens the list at its end only


def _note_shared(live: LiveSeqs, plan: StepPlan, decodes: list[Seq]) -> None:
    """Which decoding sequences begin alike."""
    min_pages = live.config.pages_for(live.config.min_shared_tokens)
    for dp_rank, cache in enumerate(live.caches):
        if cache.tree.n_common:
            own = decodes if len(live.caches) == 1 else [seq for seq in decodes if seq.dp_rank == dp_rank]
            plan.shared_prefixes += shared_prefixes(own, min_pages)


def _save_decodes(live: LiveSeqs, builder: PlanBuilder) -> None:
    """Keep the states of decoding sequences now and then."""
    for seq in builder.seqs if live.cache.enabled else ():
        cache = live.caches[seq.dp_rank]
        if cache.snapshots is not None and cache.snapshots.is_due(seq.planned):
            builder.save_decoded(cache, cache.snapshots, seq)


def _plan_prompts(live: LiveSeqs, builder: PlanBuilder, prompts: list[Seq]) -> None:
    """The next chunk of running prompts, in key order, while the budget lasts."""
    config = live.config
    for seq in prompts:
        if seq.state is not SeqState.RUNNING:  # preempted in this step
            continue
        budget, cache = builder.budgets[seq.dp_rank], live.caches[seq.dp_rank]
        length = min(seq.prefill_end - seq.planned, budget, config.long_prefill_token_threshold or budget)
        if length > 0:
            length = fit_chunk(live, builder, seq, length)
        if length > 0:
            builder.grow(cache, seq, config.pages_for(seq.planned + length) - seq.n_table_pages)
            builder.span(seq, length)
            cache.publish(seq)
            builder.save(cache, seq, seq.planned - length)
