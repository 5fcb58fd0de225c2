"""Runs each plan on all ranks: the others get it through shared memory, the result is rank 0's, or of a pipeline the
last stage's.

Owns that all ranks get the same plans and masks, in the same order. Does not own the ranks (`engine/ranks`) nor how
rank 0 computes (`inline.py`). Invariant: a step that fails on rank 0 is the end of all: others wait for it in the
middle of theirs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib

from quire.core.plan import StepMasks, StepPlan
from quire.core.result import StepResult
from quire.engine.executors.executor import Executor, RanksLost
from quire.engine.executors.inline import Drafts
from quire.engine.ranks.group import RankGroup


class RanksFuture(concurrent.futures.Future[StepResult]):
    """A step of rank 0, whose failure has a reason that may be another rank's."""

    def __init__(self, number: int, step: concurrent.futures.Future[StepResult], group: RankGroup) -> None:
        """number: of the step."""
        super().__init__()
        self._number, self._step, self._group = number, step, group

    def done(self) -> bool:
        results = self._group.results
        return self._step.done() and (results is None or results.has(self._number))

    def result(self, timeout: float | None = None) -> StepResult:
        """Raises RanksLost, or TimeoutError."""
        self._group.check()
        try:
            own, results = self._step.result(timeout), self._group.results
            return own if results is None else results.get(self._number, timeout)
        except RanksLost:
            raise
        except TimeoutError:
            raise
        except Exception as error:
            raise self._group.cause(error) from error


class RanksExecutor:
    """`Executor` of a rank 0 that has others beside it."""

    def __init__(self, own: Executor, group: RankGroup) -> None:
        """own: of rank 0."""
        self._own, self._group = own, group

    def prepare(self, plan: StepPlan) -> None:
        """For rank 0 alone: the others begin earlier, without work of control."""
        self._own.prepare(plan)

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        try:
            self._group.say(plan)
        except RanksLost as loss:
            future: concurrent.futures.Future[StepResult] = concurrent.futures.Future()
            future.set_exception(loss)
            return future
        return RanksFuture(plan.step, self._own.submit(plan), self._group)

    def drafts(self) -> Drafts:
        return self._own.drafts()

    def mask(self, masks: StepMasks) -> None:
        """A rank that is lost is told of by the step's future; rank 0 is not to wait for its masks in any case."""
        with contextlib.suppress(RanksLost):
            self._group.say(masks)
        self._own.mask(masks)

    def shutdown(self) -> None:
        """Of rank 0: the others wait for what comes next."""
        self._own.shutdown()
