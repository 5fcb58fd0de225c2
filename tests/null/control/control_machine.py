"""A hypothesis state machine over the real scheduler and the null device: any order of submissions, steps, results,
cancellations and faults, with the invariants checked after each of them."""

from __future__ import annotations

import sys
from collections import deque

import hypothesis.strategies as st
from control_checks import (
    check_contents,
    check_hits,
    check_pages,
    check_seqs,
    check_stats,
    check_tree,
    has_all_for_a_fork,
    held_by,
    longest_hit,
    pages_of,
    tree_nodes,
    unended_seqs,
)
from control_model import VOCAB, Ledger, layout_of, may_follow
from followed_trees import Follower
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.control.seq import Seq, SeqState
from quire.core.clock import VirtualClock
from quire.core.errors import ContextLengthExceeded, InvalidParameter
from quire.core.events import SeqDelta
from quire.core.failure import Code, Failure
from quire.core.plan import SpanDrafts, StepMasks, StepPlan
from quire.core.request import Pooling, Request, Terms, pooling_params
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine.executors.digests import NON_FINITE
from quire.engine.executors.null import NullExecutor
from quire.planner.pace import Pace

MASK_BYTES = -(-VOCAB // 32) * 4
GRAMMAR = StructuredOutputsParams(regex=".*")
"""Stands for any: what it allows is `may_follow`."""
BASE = [1, 2, 1, 1, 2, 2, 1, 2, 2, 2, 1, 1, 2, 1, 2, 1, 1, 1, 2, 2]
"""Prompts are a prefix of it and a short tail, so that they share."""


def as_bits(allowed: set[int]) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(MASK_BYTES, "little")


class FaultyDevice(NullExecutor):
    """The null device, which fails at one span when told to."""

    armed: int | None = None
    armed_poison: int | None = None

    def poison(self, plan: StepPlan, row: int) -> bool:
        if self.armed_poison is None or row != self.armed_poison % len(plan.spans):
            return False
        self.armed_poison = None
        return True

    def is_poisoned(self, page: int) -> bool:
        return NON_FINITE in self._rows[page]

    def fault(self, plan: StepPlan, row: int) -> Code | None:
        if self.armed is None or row != self.armed % len(plan.spans):
            return None
        self.armed = None
        return Code.NON_FINITE_LOGITS


TIGHT = Pace(factor=1.5, weights_s=2.0, token_s=1.0, cached_s=0.1, pair_s=0.1, min_tokens=1)
"""Beside a few decodes it leaves prompts one to three tokens a step."""
WINDOWS = [(0,), (0,), (0,), (0, 3), (0, 0, 2, 6), (5,), (1, 8)]
"""Of groups: one that keeps everything, several, and windows alone."""
configs = st.builds(
    lambda size, windows, pages, seqs, budget, threshold, policy, caching, depth, pace, drafts, stages: SchedulerConfig(
        n_pages=pages * len(windows) + 1, kv=layout_of(*windows), page_size=size,
        max_num_seqs=seqs, max_num_batched_tokens=seqs + budget, max_model_len=40,
        long_prefill_token_threshold=threshold, policy=policy, enable_prefix_caching=caching, pipeline_depth=depth,
        min_shared_tokens=1, pace=pace, num_speculative_tokens=0 if stages > 1 else drafts,
        n_stages=stages,
    ),
    size=st.sampled_from([1, 2, 4]),
    windows=st.sampled_from(WINDOWS),
    pages=st.integers(2, 20),
    seqs=st.integers(1, 5),
    budget=st.sampled_from([0, 1, 3, 8, 20]),
    threshold=st.sampled_from([0, 0, 2, 5]),
    policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
    caching=st.sampled_from([True, True, True, False]),
    depth=st.integers(1, 3),
    pace=st.sampled_from([None, None, TIGHT]),
    drafts=st.sampled_from([0, 0, 0, 1, 3, 6]),
    stages=st.sampled_from([1, 1, 1, 2, 3]),
)  # fmt: skip

prompts = st.builds(lambda k, tail: (BASE[:k] + tail)[:20], st.integers(1, 20), st.lists(st.integers(1, 2), max_size=3))
params = st.builds(
    lambda n, stops, min_tokens, logprobs, prompt_logprobs, grammar: SamplingParams(
        n=n, stop_token_ids=stops, min_tokens=min_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
        structured_outputs=grammar,
    ),
    st.sampled_from([1, 1, 1, 2, 3]), st.sampled_from([[], [], [3], [3, 4]]), st.sampled_from([0, 0, 2]),
    st.sampled_from([None, None, 0, 2]), st.sampled_from([None, None, None, 1]),
    st.sampled_from([None, None, GRAMMAR]),
)  # fmt: skip

requests = st.builds(
    lambda prompt, params, max_tokens, salt, end, priority, terms: Request(
        request_id="", prompt_token_ids=prompt, params=params, max_tokens=max(max_tokens, params.min_tokens), seed=0,
        end_token_ids=end, priority=priority, cache_salt=salt, terms=terms,
    ),
    prompts, params, st.integers(1, 12), st.sampled_from(["", "", "b"]), st.sampled_from([[], [5]]), st.integers(0, 2),
    st.sampled_from([Terms(), Terms(), Terms(), Terms(user="u"), Terms(tenant="t")]),
)  # fmt: skip


pooled_requests = st.builds(
    lambda prompt, pooling, salt, priority: Request(
        request_id="", prompt_token_ids=prompt, params=pooling_params(), max_tokens=1, seed=0, pooling=pooling,
        priority=priority, cache_salt=salt,
    ),
    prompts, st.sampled_from(Pooling), st.sampled_from(["", "b"]), st.integers(0, 2),
)  # fmt: skip
any_requests = st.one_of(requests, requests, requests, requests, requests, pooled_requests)


def _most_steps(seq: Seq) -> int:
    n_beams = 1 if seq.request.beams is None else seq.request.beams.width
    return n_beams * (seq.prompt_len + seq.request.max_tokens + 3)


def mask_bits(device: FaultyDevice, plan: StepPlan, seqs: list[Seq]) -> bytes:
    """What may follow the tokens that the device has, and behind each draft, until one may not be. Something is
    foretold, which the device does not heed: it makes other drafts of it."""
    drafts = device.drafts().result() if plan.masks_drafts else [SpanDrafts() for _ in plan.masked]
    bits = b""
    for span, guess in zip(plan.masked, drafts, strict=True):
        seqs[span].foretell(len(guess), [1] * (plan.step % 5))
        tokens = list(device._slots[plan.spans.slots[span]].tokens)
        allowed = may_follow(tokens)
        bits += as_bits(allowed)
        for draft in guess.tokens:
            tokens.append(draft)
            allowed = may_follow(tokens) if draft in allowed else set()
            bits += as_bits(allowed)
    return bits


def most_behind(before: dict[Seq, tuple[SeqState, int, int]], n_prompts: int, n_slots: int) -> float:
    """Prompts beside the first that a step could compute, those of preempted sequences too, for each sequence that
    decodes: at most, as pages and samples may leave fewer. n_prompts: that run."""
    running = [seq for seq, (state, _, _) in before.items() if state is SeqState.RUNNING]
    n_preempted = sum(seq.state is SeqState.WAITING for seq in running)
    n_waiting = len(before) - len(running) + n_preempted
    n_behind = max(0, n_prompts + min(n_waiting, n_slots - len(running) + n_preempted) - 1)
    return n_behind / max(1, len(running) - n_preempted - n_prompts)


class SchedulerMachine(RuleBasedStateMachine):
    """See the module."""

    keeps_order = True
    """False once everything was sent back: samples that waited for a sibling go behind those that had entered."""

    @initialize(config=configs)
    def build(self, config: SchedulerConfig) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.scheduler = Scheduler(config, self.clock)
        self.follower = Follower(self.scheduler)
        self.device = FaultyDevice(
            n_pages=config.n_pages, page_size=config.page_size, max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len, vocab_size=VOCAB, clock=self.clock,
            acceptance=0.6, depth=config.pipeline_depth, windows=config.kv.windows,
        )  # fmt: skip
        self.ledger = Ledger(config.kv.windows)
        self.in_flight: deque[tuple[list[Seq], StepPlan, StepResult]] = deque()
        self.counters: dict[str, int] = {}

    # ---- operations ----------------------------------------------------------------------------------------------

    @rule(burst=st.lists(any_requests, min_size=1, max_size=5))
    def submit(self, burst: list[Request]) -> None:
        for request in burst:
            self._submit(request)

    @rule()
    def schedule(self) -> None:
        self._schedule()

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        self._commit()

    @rule(n=st.integers(2, 20))
    def turns(self, n: int) -> None:
        for _ in range(n):
            self._turn()

    @precondition(lambda self: self.ledger.seqs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """E 28: any state, twice, exact ids only."""
        request_id, _ = self._pick(data)
        self.scheduler.cancel(request_id + "x")
        self.scheduler.cancel(request_id)
        self.ledger.end(request_id)
        self.scheduler.cancel(request_id)

    @precondition(lambda self: self.ledger.seqs)
    @rule(data=st.data())
    def cancel_seq(self, data: st.DataObject) -> None:
        request_id, index = self._pick(data)
        self.scheduler.cancel_seq(request_id, index)
        self.scheduler.cancel_seq(request_id, 99)
        self.ledger.end(request_id, index)

    @rule(row=st.integers(0, 5), late=st.booleans())
    def arm_fault(self, row: int, late: bool) -> None:
        """F: a span fails; late: its K/V is bad, and nobody sees it before a token is sampled from it."""
        if late:
            self.device.armed_poison = row
        else:
            self.device.armed = row

    @precondition(lambda self: len(self.ledger.seqs) > 3)
    @rule(go=st.sampled_from([False, False, True]))
    def fail_all(self, go: bool) -> None:
        if go:
            for delta in self.scheduler.fail_all(Failure(Code.ENGINE_ERROR, "the device failed")):
                self.ledger.hear(delta, may_fail=True)
            assert not self.ledger.live()
            while self.in_flight:
                assert self.scheduler.commit(self.in_flight.popleft()[2]) == []

    @rule(go=st.sampled_from([False, False, False, True]))
    def empty(self, go: bool) -> None:
        if go:
            self._drain()

    def _drain(self) -> None:
        """D 20-23: everything accepted ends within a bound; then nothing is held."""
        unended = unended_seqs(self.scheduler)
        bound = 20 + sum(_most_steps(seq) for seq in unended) * (len(unended) + 1)
        while self.scheduler.has_work():
            bound -= 1
            assert bound > 0, "sequences do not end"
            self._turn()
        assert not self.ledger.live() and not self.scheduler.live.running and not self.in_flight

    # ---- what operations are made of -----------------------------------------------------------------------------

    def _pick(self, data: st.DataObject) -> tuple[str, int]:
        """A sequence, live ones first."""
        live = [seq.name for seq in self.ledger.live()]
        return data.draw(st.sampled_from(live or list(self.ledger.seqs)))

    def _submit(self, request: Request) -> None:
        number = self.scheduler.live.n_submitted
        request.request_id, request.seed = f"r{number}", number * 10
        total = len(request.prompt_token_ids) + request.max_tokens
        n_pages, width = sum(self.config.pages_of(total - 1)), 1
        if request.beams is not None:
            width = request.beams.width
            n_shared = len(request.prompt_token_ids) // self.config.page_size * self.config.kv.n_full
            n_pages = n_shared + width * (n_pages - n_shared) + len(self.config.kv.windows)
        fits = total <= self.config.max_model_len and n_pages <= self.config.n_usable_pages
        fits &= width <= self.config.max_num_seqs
        try:
            self.scheduler.submit(request)
        except (ContextLengthExceeded, InvalidParameter):
            assert not fits and self.scheduler.live.n_submitted == number, "a request that fits was refused"
            return
        assert fits, "a request that can never run was accepted"  # C 18
        self.ledger.add(request, number, request.priority if self.config.policy == "priority" else 0)

    def _turn(self) -> None:
        """One turn of the engine's loop."""
        planned = self._schedule()
        if self.in_flight and (not planned or len(self.in_flight) >= self.config.pipeline_depth):
            self._commit()
        self.check()

    def _schedule(self) -> bool:
        live = self.scheduler.live
        before = {seq: (seq.state, seq.planned, seq.prefill_end) for seq in unended_seqs(self.scheduler)}
        pages = (list(live.cache.pool.refs), list(live.cache.pool._free), live.cache.tree.n_nodes)
        preemptions = live.preemptions
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.in_flight or not before, "work, nothing in flight, and no plan"  # D 20, 25
            if live.preemptions == preemptions:  # a sequence may give way to those whose last results are in flight
                assert pages == (live.cache.pool.refs, list(live.cache.pool._free), live.cache.tree.n_nodes)
                assert all(state == (seq.state, seq.planned, seq.prefill_end) for seq, state in before.items())
            return False
        seqs = list(self.scheduler.in_flight[-1].seqs)
        self._check_plan(plan, seqs, before)
        future = self.device.submit(plan)
        self._check_masked(plan, seqs)
        if plan.masked and not future.done():
            self.device.mask(StepMasks(plan.step, mask_bits(self.device, plan, seqs)))
        result = future.result()
        self._check_hints(plan)
        self.in_flight.append((seqs, plan, result))
        assert len(self.in_flight) <= self.config.pipeline_depth
        return True

    def _check_masked(self, plan: StepPlan, seqs: list[Seq]) -> None:
        """A mask for each token of a constrained sequence; no plan behind one whose masks cannot be made yet."""
        wants = zip(seqs, plan.spans.wants, strict=True)
        assert plan.masked == [i for i, (seq, one) in enumerate(wants) if one and seq.request.is_constrained]
        assert not (len(self.in_flight) > 1 and self.in_flight[-1][1].masked), "planned behind a plan without masks"

    def _commit(self) -> None:
        seqs, plan, result = self.in_flight.popleft()
        rows = [plan.spans.slots.index(fault.slot) for fault in result.faults]
        must_fail = {
            (seqs[row].request.request_id, seqs[row].index)
            for row in rows
            if seqs[row].state is not SeqState.ENDED and plan.step > seqs[row].ignore_through
        }
        tables = [table for row in rows for table in (seqs[row].tables or seqs[row].left_tables)]
        read = {page for table in tables for page in table if page}
        poisoned = {page for page in read if self.device.is_poisoned(page)}
        running = [seq for seq in seqs if seq.state is SeqState.RUNNING]
        deltas: list[SeqDelta] = self.scheduler.commit(result)
        self._check_poison_is_gone(poisoned)
        for delta in deltas:
            self.ledger.hear(delta, may_fail=(delta.request_id, delta.index) in must_fail)
        if self.config.enable_prefix_caching and not result.faults:
            self._check_left_behind([seq for seq in running if seq.state is SeqState.ENDED], deltas)
        sent_back = {(seq.request.request_id, seq.index) for seq in seqs if seq.ignore_through >= plan.step}
        assert all(self.ledger.seqs[name].ended or name in sent_back for name in must_fail), "a fault had no effect"
        if len(must_fail) == len(rows) > 0:  # the fault of one that has ended may send those back who fail with it
            assert any(self.ledger.seqs[name].ended for name in must_fail), "a fault ended nobody"

    def _check_left_behind(self, ended: list[Seq], deltas: list[SeqDelta]) -> None:
        """B: a sequence that has ended now leaves a prefix of all its whole pages; one with forks may lose some."""
        names = {(delta.request_id, delta.index) for delta in deltas if delta.finish_reason is not None}
        for seq in ended:
            alone = seq.request.params.n == 1 and seq.request.beams is None
            if (seq.request.request_id, seq.index) in names and alone:
                found = longest_hit(self.scheduler, seq.request.cache_salt, seq.tokens)
                assert len(found) >= (len(seq.tokens) - 1) // self.config.page_size, "the next turn finds too little"

    def _check_poison_is_gone(self, poisoned: set[int]) -> None:
        """F: non-finite K/V that was noticed is in nobody's table and not in the tree."""
        live = self.scheduler.live
        nodes = tree_nodes(self.scheduler)
        assert not poisoned.intersection(page for node in nodes for page in pages_of(node)), "bad K/V stays in the tree"
        for seq in live.running:
            assert not poisoned.intersection(held_by(seq) + seq.copied_pages), "a reader goes on"

    def _check_hints(self, plan: StepPlan) -> None:
        """Pages that a hint calls shared are the same in the tables of that step, and planned before its end."""
        end_of = dict(
            zip(plan.spans.slots, map(sum, zip(plan.spans.starts, plan.spans.lengths, strict=True)), strict=True)
        )
        named = [slot for slots, _ in plan.shared_prefixes for slot in slots]
        assert len(set(named)) == len(named), "a sequence is in two groups"
        for slots, n_pages in plan.shared_prefixes:
            n_full = self.config.kv.n_full
            shared = {tuple(page for table in self._kept(slot) for page in table[:n_pages]) for slot in slots}
            assert len(slots) > 1 and len(shared) == 1 and len(shared.pop()) == n_pages * n_full, (
                "other pages than the hint says"
            )
            assert all(n_pages * self.config.page_size <= end_of[slot] for slot in slots), "pages that are not full"

    def _kept(self, slot: int) -> list[list[int]]:
        """Its tables of groups without a window, as the device has them."""
        return self.device._slots[slot].tables[: self.config.kv.n_full]

    def _check_plan(self, plan: StepPlan, seqs: list[Seq], before: dict[Seq, tuple[SeqState, int, int]]) -> None:
        """C 16, 19 and D 22: budgets, decode first, victims and admissions by the stated order."""
        config, running = self.config, self.scheduler.live.running
        threshold = config.long_prefill_token_threshold or config.max_num_batched_tokens
        assert sum(plan.spans.lengths) == plan.n_tokens <= config.max_num_batched_tokens
        self._check_pace(plan, seqs, before)
        orders = {seq: self.ledger.seqs[seq.request.request_id, seq.index].order for seq in [*before, *running]}
        spans = plan.spans
        for seq, start, length, n_drafts in zip(seqs, spans.starts, spans.lengths, spans.n_drafts, strict=True):
            last = len(seq.request.prompt_token_ids) + seq.request.max_tokens - 1
            assert length - n_drafts <= threshold and start + length <= last, "a span beyond the limits"
            assert n_drafts <= config.num_speculative_tokens, "more drafts than are allowed"
        preempted = [seq for seq in before if before[seq][0] is SeqState.RUNNING and seq.state is SeqState.WAITING]
        for victim in preempted:
            assert all(orders[victim] > orders[seq] for seq in running), "the wrong victim was preempted"
        for seq, (state, start, prefill_end) in before.items():
            if state is SeqState.RUNNING and seq not in preempted and prefill_end <= start < seq.limit:
                waits = seq is running[-1] and seq.planned >= seq.returns_at
                waits |= seq.search is not None and seq.search is running[-1].search
                waits |= config.n_stages > 1  # it has its turn later, or the work would not end in time
                assert seq in seqs or waits, "a decoding sequence was left out of a step"
        admitted = [seq for seq in seqs if seq in before and before[seq][0] is SeqState.WAITING]
        assert not (preempted and admitted), "a step that preempts admits"
        for seq in admitted:
            self._check_fork(plan, seq, before)
        for seq in before if self.keeps_order else ():
            same = [orders[other] for other in admitted if other.request.terms == seq.request.terms]
            if seq.state is SeqState.WAITING and same and orders[seq] < max(same):
                siblings = self.scheduler.live.requests[seq.request.request_id]
                in_prompt = [other for other in siblings if other.state is SeqState.RUNNING]
                assert seq.request.params.n > 1 and in_prompt, "a later arrival overtook a waiting sequence"
                forks = [other for other in in_prompt if has_all_for_a_fork(self.scheduler, seq, other)]
                assert all(other.prompt_step >= plan.step for other in forks), "a sample waits though it could fork"

    def _check_fork(self, plan: StepPlan, seq: Seq, before: dict[Seq, tuple[SeqState, int, int]]) -> None:
        """C: a new sample beside a sibling that has their prompt computes its last token alone."""
        if seq.request.params.n == 1 or len(seq.tokens) > seq.prompt_len:
            return
        others = [one for one in self.scheduler.live.requests[seq.request.request_id] if one is not seq]
        for other in others:
            is_there = other.state is SeqState.RUNNING and before[other][0] is SeqState.RUNNING
            if is_there and other.prompt_step < plan.step and has_all_for_a_fork(self.scheduler, seq, other):
                start = plan.spans.starts[plan.spans.slots.index(seq.slot)]
                assert start == seq.prompt_len - 1, "a sample computes again what its sibling has"

    def _check_pace(self, plan: StepPlan, seqs: list[Seq], before: dict[Seq, tuple[SeqState, int, int]]) -> None:
        """Beside decodes prompts take at most as many tokens as the pace allows at the longest context among them."""
        if any(seq.search is not None for seq in seqs):  # its members are not what they were before
            return
        decodes = [
            before[seq][1] for seq in seqs if before[seq][0] is SeqState.RUNNING and before[seq][1] >= before[seq][2]
        ]
        if self.config.pace is None or not decodes:
            return
        contexts = [start for state, start, end in before.values() if state is SeqState.RUNNING and start < end]
        behind = most_behind(before, len(contexts), self.config.n_slots)
        allowed = self.config.pace.prompt_tokens(len(decodes), sum(decodes), max(contexts, default=0), behind)
        n_prompt_tokens = plan.n_tokens - len(decodes) - sum(plan.spans.n_drafts)
        assert n_prompt_tokens <= allowed, "prompts stall the decodes beside them"

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "config"):
            return
        check_pages(self.scheduler)
        check_tree(self.scheduler)
        check_seqs(self.scheduler)
        self.follower.check(self.scheduler)
        waiting = [seq for seq in unended_seqs(self.scheduler) if seq.state is SeqState.WAITING][:3]
        prompts = [(seq.request.cache_salt, seq.tokens) for seq in waiting]
        check_hits(self.scheduler, [("", [*BASE, 1]), ("b", [*BASE[:9], 1, 2]), *prompts])
        check_stats(self.scheduler, len(self.ledger.seqs), self.ledger.n_ended)
        if not any(result.faults for _, _, result in self.in_flight):
            check_contents(self.scheduler, self.device)
        stats = self.scheduler.stats()
        assert stats.generation_tokens == self.ledger.n_generated
        now = {name: getattr(stats, name) for name in ("steps", "computed_tokens", "prompt_tokens", "preemptions")}
        assert all(now[name] >= value for name, value in self.counters.items()), "a counter went back"
        self.counters = now

    def teardown(self) -> None:
        if hasattr(self, "config") and sys.exc_info()[0] is None:  # else a rule failed, and what is left says little
            self.device.armed = self.device.armed_poison = None
            self._drain()
            self.check()
