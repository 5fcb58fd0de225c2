"""Results of other ranks: whose count, and when all have come."""

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


def executor(group: Any, rests: list[str]) -> RanksExecutor:
    own: Any = Own()
    return RanksExecutor(own, group, rest=lambda: rests.append("rest"))


def test_ranks_rest_when_the_last_result_has_come() -> None:
    rests: list[str] = []
    ranks = executor(Group(LastStage()), rests)
    first, second = (ranks.submit(StepPlan(step, [])) for step in (4, 5))
    for future, step, n_rests in ((first, 4, 0), (second, 5, 1)):
        with pytest.raises(TimeoutError):
            future.result(0)
        assert not rests, "it will be asked for again"
        assert future.result(0).tokens == [step], "the last stage's"
        assert len(rests) == n_rests
    with pytest.raises(TimeoutError):
        ranks.submit(StepPlan(6, [])).result(0)
    assert len(rests) == 1


def test_a_result_of_rank_0_alone_counts_too() -> None:
    rests: list[str] = []
    assert executor(Group(), rests).submit(StepPlan(4, [])).result(0).tokens == [] and rests
