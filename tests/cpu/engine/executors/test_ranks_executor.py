"""Results of other ranks: whose count, and who is told that they came."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest

from quire.core.plan import StepPlan
from quire.core.result import StepResult
from quire.engine.executors.ranks import RanksExecutor


class Own:
    """Rank 0, which knows nothing of its steps."""

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        done: concurrent.futures.Future[StepResult] = concurrent.futures.Future()
        done.set_result(StepResult(plan.step))
        return done


class LastStage:
    """Says each step when it is asked the second time."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def wait(self, step: int, timeout: float | None) -> None:
        self.asked.append(step)
        if self.asked.count(step) == 1:
            raise TimeoutError

    def take(self, step: int) -> StepResult:
        return StepResult(step, tokens=[step])


class Group:
    def __init__(self, *results: LastStage) -> None:
        self.results = results

    def check(self) -> None: ...

    def say(self, plan: StepPlan) -> None: ...


def executor(group: Any, told: list[int]) -> RanksExecutor:
    own: Any = Own()
    return RanksExecutor(own, group, tell=told.append)


def test_a_step_is_told_of_once_when_its_result_has_come() -> None:
    told: list[int] = []
    ranks = executor(Group(LastStage()), told)
    futures = [ranks.submit(StepPlan(step, [])) for step in (4, 5)]
    with pytest.raises(TimeoutError):
        futures[0].result(0)
    assert not told
    assert futures[0].result(0).tokens == told == [4], "the last stage's"


def test_nobody_is_told_where_the_result_is_rank_0s_own() -> None:
    told: list[int] = []
    assert executor(Group(), told).submit(StepPlan(4, [])).result(0).tokens == [] and not told
