"""The null device for simulations: a step brings one made-up token for each span that wants one, at a moment to come.

Unlike `null.py` it computes nothing and checks nothing; its steps take the time of the cost model on a device that runs
them one after the other, while the host goes on: a result is there when the virtual clock has come to the step's end,
and waiting for it moves the clock there. Of a pipeline a step goes through all stages, each of which has it as long;
it begins when the tokens before it are chosen. Of data-parallel ranks each has a part of it, and begins with the next
one whatever the others do. Owns that clockwork only: no drafts, masks, logprobs and vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from quire.core.clock import VirtualClock
from quire.core.errors import EngineError
from quire.core.plan import SpanDrafts, StepMasks, StepPlan
from quire.core.result import StepResult, StepTimings

TOKEN: Final = 0
"""What every sequence says."""


class TimedFuture(Future[StepResult]):
    """Waiting for it moves the clock to the step's end. No other thread waits, so it has no lock."""

    def __init__(self, result: StepResult, end_s: float, clock: VirtualClock) -> None:
        self._step_result, self._end_s, self._clock = result, end_s, clock

    def done(self) -> bool:
        """Always: who asks goes on with `result`."""
        return True

    def result(self, timeout: float | None = None) -> StepResult:
        """The result, at the time at which there is one."""
        lacking_s = self._end_s - self._clock.now_s()
        if lacking_s > 0:
            self._clock.advance(lacking_s)
        return self._step_result


class TimedNullExecutor:
    """An Executor without a model. ranks_s: seconds that each data-parallel rank needs for a plan; of a pipeline, each
    of its stages."""

    def __init__(
        self,
        clock: VirtualClock,
        ranks_s: Callable[[StepPlan], Sequence[float]],
        n_stages: int = 1,
        n_dp_ranks: int = 1,
        idle_s: float = 0.0,
    ) -> None:
        """idle_s: what host and device take beside a step that finds the device idle; else it is hidden."""
        self._clock, self._ranks_s, self._idle_s = clock, ranks_s, idle_s
        self._free_s = [[clock.now_s()] * n_stages for _ in range(n_dp_ranks)]
        """Of each data-parallel rank, when each stage has done all that was submitted."""
        self._tokens_s: dict[int, float] = {}
        """Slot → when its newest token is chosen, without which the first of several stages cannot go on with it."""
        self.busy_s = 0.0
        """Seconds of all steps together, in one stage; of data-parallel ranks the mean."""

    def prepare(self, _: StepPlan) -> None:
        """Nothing takes the host time here."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Put a step behind those that were submitted before."""
        ranks_s, n, now_s = self._ranks_s(plan), plan.spans.wants.count(True), self._clock.now_s()
        n_stages = len(self._free_s[0])
        begin_s = max(now_s, self._tokens_back_s(plan)) if n_stages > 1 else now_s
        if all(stages[-1] <= now_s for stages in self._free_s):
            begin_s += self._idle_s
        end_s, total_s = begin_s, 0.0
        for stages, seconds in zip(self._free_s, ranks_s, strict=True):
            if seconds:
                end_s, total_s = max(end_s, _through(stages, begin_s, seconds)), total_s + seconds
        if n_stages > 1:
            spans = plan.spans
            self._tokens_s.update((slot, end_s) for slot, wants in zip(spans.slots, spans.wants, strict=True) if wants)
        self.busy_s += total_s / len(ranks_s)
        result = StepResult(plan.step, [TOKEN] * n, [1] * n, timings=StepTimings(0.0, max(ranks_s)))
        return TimedFuture(result, end_s, self._clock)

    def _tokens_back_s(self, plan: StepPlan) -> float:
        """When the last stage has chosen all tokens that a step begins with."""
        known = self._tokens_s
        for opened in plan.opened:
            known.pop(opened.slot, None)
        return max((known[slot] for slot in plan.spans.slots if slot in known), default=0.0)

    def drafts(self) -> Future[list[SpanDrafts]]:
        """Nobody drafts here."""
        raise EngineError("a simulated step was asked for its drafts")

    def mask(self, masks: StepMasks) -> None:
        """No grammar is followed here."""
        raise EngineError(f"masks came for the simulated step {masks.step}")

    def shutdown(self) -> None:
        """Nothing is held."""


def _through(free_s: list[float], begin_s: float, seconds: float) -> float:
    """When a step that may begin then is through all stages, each of which is free at a time of its own."""
    for stage, one_s in enumerate(free_s):
        free_s[stage] = begin_s = max(begin_s, one_s) + seconds
    return begin_s
