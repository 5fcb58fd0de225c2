"""Runs plans in this process. On a GPU launches return before the work is done; on a CPU one worker thread computes.

Owns the order of steps (first in, first out). Does not own what a step does (`compute/runner`).
"""

from __future__ import annotations

import concurrent.futures
import queue
import time
from typing import Protocol

from quire.core.errors import EngineError
from quire.core.plan import StepMasks, StepPlan
from quire.core.result import StepResult


class Pending(Protocol):
    """A launched step."""

    def mask(self, masks: StepMasks) -> None:
        """Choose the tokens of a step that has `masked` spans."""
        ...

    def result(self) -> StepResult:
        """Wait for the device and build the result."""
        ...


class Launcher(Protocol):
    """The part of the runner that an executor needs."""

    def launch(self, plan: StepPlan) -> Pending: ...


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

    def __init__(self, runner: Launcher) -> None:
        self._runner = runner
        self._unmasked: LaunchedFuture | None = None

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        try:
            future = LaunchedFuture(self._runner.launch(plan))
            self._unmasked = future if plan.masked else None
            return future
        except Exception as error:
            failed: concurrent.futures.Future[StepResult] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed

    def mask(self, masks: StepMasks) -> None:
        """Launch what the newest step still lacks; nothing to do if its launch failed."""
        future, self._unmasked = self._unmasked, None
        if future is not None:
            future.mask(masks)

    def shutdown(self) -> None:
        """Nothing runs in the background."""


class ThreadExecutor:
    """For a device that is the host itself: one thread computes while the caller plans the next step."""

    def __init__(self, runner: Launcher) -> None:
        self._runner = runner
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-compute")
        self._masks: queue.SimpleQueue[StepMasks | None] = queue.SimpleQueue()

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        return self._pool.submit(self._run, plan)

    def _run(self, plan: StepPlan) -> StepResult:
        start_s = time.perf_counter()
        step: Pending | None = None
        try:
            step = self._runner.launch(plan)
        finally:
            masks = self._masks.get() if plan.masked else None  # also after a failure: they must not reach another step
        if plan.masked:
            if masks is None:
                raise EngineError("the engine was shut down")
            step.mask(masks)
        result = step.result()
        result.timings.total_s = time.perf_counter() - start_s
        return result

    def mask(self, masks: StepMasks) -> None:
        self._masks.put(masks)

    def shutdown(self) -> None:
        self._masks.put(None)
        self._pool.shutdown(wait=True, cancel_futures=True)
