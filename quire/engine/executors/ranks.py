"""Runs each plan on all ranks: the others get it through shared memory, the result is rank 0's, or of a pipeline the
last stage's, or of data-parallel ranks that of each of them, joined.

Owns that all ranks get the same plans and masks, in the same order, and whose results count. Does not own the ranks
(`engine/ranks`) nor how rank 0 computes (`inline.py`). Invariant: a step that fails on rank 0 is the end of all: others
wait for it in the middle of theirs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable

from quire.core.plan import StepMasks, StepPlan
from quire.core.plan_parts import joined
from quire.core.result import StepResult
from quire.engine.executors.executor import Executor, RanksLost
from quire.engine.executors.inline import Drafts
from quire.engine.ranks.group import RankGroup


class RanksFuture(concurrent.futures.Future[StepResult]):
    """A step of rank 0, whose failure has a reason that may be another rank's."""

    def __init__(
        self,
        plan: StepPlan,
        step: concurrent.futures.Future[StepResult],
        group: RankGroup,
        n_slots: int,
        told: Callable[[], None],
    ) -> None:
        """n_slots: as in `RanksExecutor`. told: called once, when the result is known."""
        super().__init__()
        self._plan, self._step, self._group, self._n_slots, self._told = plan, step, group, n_slots, told
        self._own: StepResult | None = None

    def done(self) -> bool:
        return self._step.done() and all(one.has(self._plan.step) for one in self._group.results)

    def result(self, timeout: float | None = None) -> StepResult:
        """Raises RanksLost, or TimeoutError: it may be asked again then."""
        self._group.check()
        try:
            own, others = self._own or self._step.result(timeout), self._group.results
            self._own = own
            for one in others:
                one.wait(self._plan.step, timeout)
            results = [one.take(self._plan.step) for one in others]
            self._told()
            if self._n_slots:
                return joined(self._plan, [own, *results], self._n_slots)
            return results[-1] if results else own
        except RanksLost:
            raise
        except TimeoutError:
            raise
        except Exception as error:
            raise self._group.cause(error) from error


class RanksExecutor:
    """`Executor` of a rank 0 that has others beside it."""

    def __init__(
        self, own: Executor, group: RankGroup, n_slots: int = 0, rest: Callable[[], None] = lambda: None
    ) -> None:
        """own: of rank 0. n_slots: of each data-parallel rank; 0: there is one. rest: called by who asks for a result,
        when no step is under way any more."""
        self._own, self._group, self._n_slots, self._rest = own, group, n_slots, rest
        self._n_open = 0
        """Steps whose result nobody has yet."""

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
        self._n_open += 1
        return RanksFuture(plan, self._own.submit(plan), self._group, self._n_slots, self._told)

    def _told(self) -> None:
        self._n_open -= 1
        if not self._n_open:
            self._rest()

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
