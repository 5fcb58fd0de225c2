"""The loop in which the wings meet: schedule, submit, wait for the step before, commit.

Owns the steps in flight. Does not own policy (`control`), tensors (`compute`), text or sockets.
Invariant: results are committed in the order in which their plans were made.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable

from quire.control.scheduler import Scheduler
from quire.core.clock import Clock
from quire.core.events import Cancel, CancelSeq, Command, EngineStats, SeqDelta, Shutdown, Submit
from quire.core.plan import StepPlan
from quire.core.result import StepResult
from quire.engine.executors.executor import Executor

logger = logging.getLogger("quire.engine")


@dataclasses.dataclass(slots=True)
class StepRecord:
    """What one committed step did, for plots and logs."""

    step: int
    time_s: float
    n_spans: int
    n_tokens: int
    n_prefill_tokens: int
    n_running: int
    """Sequences with a slot once the step was committed."""
    n_waiting: int
    host_s: float
    total_s: float


class EngineCore:
    """One scheduler, one executor, at most `depth` steps between them."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Clock, depth: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.on_step: Callable[[StepRecord], None] | None = None
        self._depth = depth
        self._in_flight: collections.deque[tuple[StepPlan, concurrent.futures.Future[StepResult]]] = collections.deque()

    def step(self) -> list[SeqDelta]:
        """Keep the device busy, then take in the oldest finished step. Returns what sequences gained."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append((plan, self.executor.submit(plan)))
        if not self._in_flight or (plan is not None and len(self._in_flight) < self._depth):
            return []
        return self._commit(*self._in_flight.popleft())

    def _commit(self, plan: StepPlan, future: concurrent.futures.Future[StepResult]) -> list[SeqDelta]:
        try:
            result = future.result()
            deltas = self.scheduler.commit(result)
        except Exception as error:
            return self._fail(error)
        if self.on_step is not None:
            self.on_step(self._record(plan, result))
        return deltas

    def _fail(self, error: Exception) -> list[SeqDelta]:
        """A whole step failed: nothing in flight can be trusted, so every running sequence ends with an error."""
        logger.error("step failed, all running requests end with an error", exc_info=error)
        for _, future in self._in_flight:
            concurrent.futures.wait([future], timeout=60)
        self._in_flight.clear()
        return self.scheduler.fail_all("the engine failed while computing a step")

    def handle(self, command: Command) -> None:
        """Apply one command. A refused submission raises its RequestError."""
        match command:
            case Submit(request):
                self.scheduler.submit(request)
            case Cancel(request_ids):
                for request_id in request_ids:
                    self.scheduler.cancel(request_id)
            case CancelSeq(request_id, index):
                self.scheduler.cancel_seq(request_id, index)
            case Shutdown():
                self.shutdown()

    def has_work(self) -> bool:
        """True while a step is in flight or a request is unfinished."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def shutdown(self) -> None:
        """Stop the executor; steps in flight are dropped."""
        self._in_flight.clear()
        self.executor.shutdown()

    def _record(self, plan: StepPlan, result: StepResult) -> StepRecord:
        n_decode = sum(
            1 for length, wants in zip(plan.spans.lengths, plan.spans.wants, strict=True) if wants and length == 1
        )
        return StepRecord(
            step=plan.step,
            time_s=self.clock.now_s(),
            n_spans=len(plan.spans),
            n_tokens=plan.n_tokens,
            n_prefill_tokens=plan.n_tokens - n_decode,
            n_running=len(self.scheduler.roster.running),
            n_waiting=len(self.scheduler.roster.waiting),
            host_s=result.timings.host_s,
            total_s=result.timings.total_s,
        )
