"""Runs plans in this process. On a GPU launches return before the work is done; on a CPU one worker thread computes.

Owns the order of steps (first in, first out). Does not own what a step does (`compute/worker`).
"""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Callable
from typing import Protocol

from quire.core.errors import EngineError
from quire.core.plan import OnDrafts, SpanDrafts, StepMasks, StepPlan
from quire.core.result import StepResult

Drafts = concurrent.futures.Future[list[SpanDrafts]]


class Result(Protocol):
    """A step that was computed, or that the device computes."""

    def result(self) -> StepResult:
        """Wait for the device and build the result."""
        ...


class Pending(Result, Protocol):
    """A launched step."""

    def mask(self, masks: StepMasks) -> None:
        """Choose the tokens of a step that has `masked` spans."""
        ...


class Ready(Result, Protocol):
    """A step that was made ready before its turn."""

    def compute(self) -> None:
        """What is left, to be done in its turn, in any thread. Leaves a core to other work until `hurry`."""
        ...

    def hurry(self) -> None:
        """There is no other work any more; may be called while it computes."""
        ...


class Launcher(Protocol):
    """The part of a worker that an executor needs."""

    def launch(self, plan: StepPlan, on_drafts: OnDrafts | None = None) -> Pending:
        """on_drafts: called with the drafts of each masked span, before anything is computed."""
        ...

    def stage(self, plan: StepPlan) -> Callable[[], Pending] | None:
        """Do what can be done before the step before has its masks; what is returned launches the step."""
        ...


class LaunchedFuture(concurrent.futures.Future[StepResult]):
    """A future whose waiting is done by whoever asks for the result, not by a thread.

    The device cannot be waited for in part: the first `result()` blocks until the step is done,
    whatever `timeout` says, and records its result or exception; `concurrent.futures.wait` would never return.
    """

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def mask(self, masks: StepMasks) -> None:
        """Launch the rest of a step that was launched without its masks."""
        try:
            self._pending.mask(masks)
        except Exception as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            try:
                self.set_result(self._pending.result())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


class LaunchExecutor:
    """For devices that compute on their own: `submit` launches at once in the caller's thread."""

    def __init__(self, worker: Launcher) -> None:
        self.worker = worker
        self._unmasked: LaunchedFuture | None = None
        self._staged: tuple[StepPlan, Callable[[], Pending]] | None = None
        self._drafts = Drafts()

    def prepare(self, plan: StepPlan) -> None:
        launch = None if self._unmasked is None else self.worker.stage(plan)
        self._staged = None if launch is None else (plan, launch)

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        staged, self._staged = self._staged, None
        if plan.masks_drafts:
            self._drafts = Drafts()
        try:
            if staged is not None and staged[0] is plan:
                future = LaunchedFuture(staged[1]())
            else:
                future = LaunchedFuture(_launched(self.worker, plan, self._drafts))
            self._unmasked = future if plan.masked else None
            return future
        except Exception as error:
            return _failed(error)

    def drafts(self) -> Drafts:
        return self._drafts

    def mask(self, masks: StepMasks) -> None:
        """Launch what the newest step still lacks; nothing to do if its launch failed."""
        future, self._unmasked = self._unmasked, None
        if future is not None:
            future.mask(masks)

    def in_turn(self, work: Callable[[], None]) -> None:
        """Do it behind the steps that were launched. It must not raise."""
        work()

    def shutdown(self) -> None:
        """Nothing runs in the background. A step that will get no masks holds its captured choice."""
        self._unmasked = self._staged = None


class ComputedFuture(concurrent.futures.Future[StepResult]):
    """A step of the compute thread, turned into plain values by whoever asks for its result, once: the thread is at the
    next step by then."""

    def __init__(self, computing: concurrent.futures.Future[tuple[Result, float]], ready: Ready | None) -> None:
        super().__init__()
        self._computing, self._ready = computing, ready

    def done(self) -> bool:
        return self._computing.done()

    @property
    def succeeded(self) -> bool:
        """Whether it is computed, without an error."""
        return self._computing.done() and self._computing.exception() is None

    def result(self, timeout: float | None = None) -> StepResult:
        if self._ready is not None:
            self._ready.hurry()
        step, total_s = self._computing.result(timeout)
        result = step.result()
        result.timings.total_s = total_s
        return result


class ThreadExecutor:
    """For a device that is the host itself: one thread computes while the caller makes the next step ready.

    prepare: does all of a step that can be done before its turn; None, from it or in its place: the thread launches the
    step. Only for plans that open and close no slot, and when the newest step that does is computed without an error:
    after a failure slots are not what plans take them for.
    """

    def __init__(self, worker: Launcher, prepare: Callable[[StepPlan], Ready | None] | None = None) -> None:
        self.worker, self._prepare = worker, prepare
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-compute")
        self._masks: queue.SimpleQueue[StepMasks | None] = queue.SimpleQueue()
        self._drafts = Drafts()
        self._changing: ComputedFuture | None = None
        """The newest step that opens or closes slots."""

    def prepare(self, _: StepPlan) -> None:
        """`submit` does it: the thread takes one step after the other."""

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        ready, changes = None, bool(plan.opened or plan.closed)
        if not changes and self._prepare is not None and (self._changing is None or self._changing.succeeded):
            try:
                ready = self._prepare(plan)
            except Exception as error:
                return _failed(error)
        if plan.masks_drafts:
            self._drafts = Drafts()
        drafts = self._drafts
        job = self._pool.submit(self._launch, plan, drafts) if ready is None else self._pool.submit(_compute, ready)
        future = ComputedFuture(job, ready)
        if changes:
            self._changing = future
        return future

    def _launch(self, plan: StepPlan, drafts: Drafts) -> tuple[Result, float]:
        start_s = time.perf_counter()
        step: Pending | None = None
        try:
            step = _launched(self.worker, plan, drafts)
        finally:
            masks = self._masks.get() if plan.masked else None  # also after a failure: they must not reach another step
        if plan.masked:
            if masks is None:
                raise EngineError("the engine was shut down")
            step.mask(masks)
        return step, time.perf_counter() - start_s

    def drafts(self) -> Drafts:
        return self._drafts

    def mask(self, masks: StepMasks) -> None:
        self._masks.put(masks)

    def in_turn(self, work: Callable[[], None]) -> None:
        """Do it behind the steps that were submitted, in their thread. It must not raise."""
        self._pool.submit(work)

    def shutdown(self) -> None:
        self._masks.put(None)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._changing = None  # its step holds the model


def _compute(ready: Ready) -> tuple[Result, float]:
    start_s = time.perf_counter()
    ready.compute()
    return ready, time.perf_counter() - start_s


def _launched(worker: Launcher, plan: StepPlan, drafts: Drafts) -> Pending:
    """drafts: told in any case, if the plan asks for them."""
    if not plan.masks_drafts:
        return worker.launch(plan)
    try:
        return worker.launch(plan, drafts.set_result)
    finally:
        if not drafts.done():
            drafts.set_result([])


def _failed(error: Exception) -> concurrent.futures.Future[StepResult]:
    future: concurrent.futures.Future[StepResult] = concurrent.futures.Future()
    future.set_exception(error)
    return future
