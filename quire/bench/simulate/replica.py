"""One engine in a simulation: takes requests, makes steps, notes what came when.

Owns the order in which time passes: a request that comes while a step runs is seen when that step has ended, as in the
real loop. Does not own decisions, which are the engine's, nor the clock's pace (`engine/simulated.py`).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Final, Protocol

from quire.bench.simulate.record import Outcome, StepLog
from quire.bench.simulate.requests import SimRequest
from quire.core.commands import Submit
from quire.core.errors import RequestError
from quire.core.events import PrefixUpdate, SeqDelta
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.prefix_updates import PrefixPublisher
from quire.engine.simulated import SimulatedMachine
from quire.engine.step_record import StepRecord

SAMPLE_STEPS: Final = 16
"""The cache is looked at once in so many steps: to count what sequences hold costs time for each of them."""


class Replica(Protocol):
    """Whatever takes requests and makes steps."""

    log: StepLog

    @property
    def now_s(self) -> float:
        """Its clock."""
        ...

    @property
    def next_s(self) -> float:
        """When it makes its next step; inf: not before something comes."""
        ...

    def close(self) -> None:
        """No request comes any more."""
        ...

    def submit(self, outcome: Outcome, request: SimRequest, prompt: list[int]) -> None:
        """A request comes now, or while the step before runs."""
        ...

    def follow(self) -> None:
        """Its prefix tree is asked about from now on."""
        ...

    def update(self) -> PrefixUpdate:
        """What has changed in its prefix tree since it was asked last."""
        ...

    def step(self) -> list[Outcome]:
        """Let time pass until something has happened; returns the requests that ended, or got their first token."""
        ...


class EngineReplica:
    """The real engine, on a clock of its own."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.engine = machine.engine()
        self.log = StepLog(kv_slots=machine.kv_slots)
        self._page_size = machine.page_tokens
        self._told: list[PrefixUpdate] = []
        self._prefixes = PrefixPublisher(self.engine.core.scheduler, self._tell_prefixes)
        self._open: dict[str, Outcome] = {}
        self._fresh: set[str] = set()
        """Without a token."""
        self._params: dict[int, SamplingParams] = {}
        self._is_staged = machine.config.pipeline_parallel_size > 1
        self._token_s: dict[str, float] = {}
        """Of stages: when each open request had its last token."""
        self._last_s = self._sampled_s = self._step_s = 0.0
        self.engine.core.on_step = self._on_step

    @property
    def now_s(self) -> float:
        """Its clock."""
        return self.engine.clock.now_s()

    @property
    def next_s(self) -> float:
        """At once, where there is a step to make."""
        engine = self.engine
        return engine.clock.now_s() if engine.core.has_work() else math.inf

    def close(self) -> None:
        """It waits for nobody anyway."""

    def submit(self, outcome: Outcome, request: SimRequest, prompt: list[int]) -> None:
        """Queue it, or note why the engine refuses it."""
        lacking_s = request.arrival_s - self.now_s
        if lacking_s > 0:
            self.engine.clock.advance(lacking_s)
            self._sampled_s = self._step_s = request.arrival_s
        name, n = str(outcome.number), request.output_len
        params = self._params.get(n)
        if params is None:
            params = self._params[n] = SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False)
        try:
            command = Submit(
                Request(request_id=name, prompt_token_ids=prompt, params=params, max_tokens=n, seed=outcome.number)
            )
            self.engine.core.handle(command)
        except RequestError as error:
            outcome.refusal, outcome.reason = error.code.value, error.message
            return
        self._open[name] = outcome
        self._fresh.add(name)

    def follow(self) -> None:
        """As a client of the engine's process does."""
        self._prefixes.follow(0)

    def update(self) -> PrefixUpdate:
        """What that is told."""
        self._prefixes.send()
        return self._told.pop()

    def step(self) -> list[Outcome]:
        """One turn of the engine's loop."""
        deltas = self.engine.core.step()
        if not deltas:
            return []
        now_s, fresh = self.engine.clock.now_s(), self._fresh
        n_before = len(fresh)
        told = [
            self._tell(delta, now_s)
            for delta in deltas
            if delta.finish_reason is not None or (fresh and delta.request_id in fresh)
        ]
        if self._is_staged:
            self._note_gaps(deltas, now_s)
        elif n_gaps := len(deltas) - n_before + len(fresh):
            self.log.gaps_s.append(now_s - self._last_s)
            self.log.n_gaps.append(n_gaps)
        self._last_s = now_s
        return told

    def _note_gaps(self, deltas: Sequence[SeqDelta], now_s: float) -> None:
        """Of stages, where the step before had other sequences: since each one's own last token."""
        last = self._token_s
        gaps = collections.Counter(last[delta.request_id] for delta in deltas if delta.request_id in last)
        for token_s, n_gaps in gaps.items():
            self.log.gaps_s.append(now_s - token_s)
            self.log.n_gaps.append(n_gaps)
        for delta in deltas:
            last[delta.request_id] = now_s
            if delta.finish_reason is not None:
                del last[delta.request_id]

    def _tell_prefixes(self, ticket: int, update: PrefixUpdate) -> bool:
        self._told.append(update)
        return True

    def _tell(self, delta: SeqDelta, now_s: float) -> Outcome:
        name = delta.request_id
        outcome = self._open[name]
        if name in self._fresh:
            self._fresh.discard(name)
            outcome.first_s, outcome.n_cached = now_s, delta.n_cached
        if delta.finish_reason is not None:
            del self._open[name]
            if delta.failure is None:
                outcome.end_s = now_s
            else:
                outcome.refusal, outcome.reason = delta.failure.code.value, delta.failure.message
        return outcome

    def _on_step(self, record: StepRecord) -> None:
        time_s = record.time_s
        self.log.step(
            time_s, time_s - self._step_s, record.n_running, record.n_waiting, record.n_tokens, record.n_prefill_tokens
        )
        self._step_s = time_s
        if self.log.n_steps % SAMPLE_STEPS == 0 or not self.engine.core.scheduler.has_work():
            self._sample()

    def _sample(self) -> None:
        log, now_s = self.log, self.now_s
        stats = self.engine.core.stats(with_map=False)
        log.sample(
            now_s, now_s - self._sampled_s, stats.n_tokens_held, stats.n_slots_taken,
            stats.n_pages_cached * self._page_size,
        )  # fmt: skip
        self._sampled_s = now_s
        log.prefix_queries, log.prefix_hits = stats.prefix_queries, stats.prefix_hits
        log.preemptions, log.busy_s = stats.preemptions, self.engine.executor.busy_s
