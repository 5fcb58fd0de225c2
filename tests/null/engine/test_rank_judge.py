"""Which rank is blamed: the one that others wait for, never one that waits; and results come back in their own ring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from quire.config.mesh import MeshShape
from quire.core.errors import EngineError
from quire.core.result import StepResult
from quire.engine.ranks.done import DoneSteps
from quire.engine.ranks.judge import LOST_S, STUCK_S, Judge
from quire.engine.ranks.results import N_ENDS, ResultReader, ResultWriter
from quire.engine.ranks.ring import IDLE, READY, STEPPING, Standing, make_memory


def rank(n_calls: int, n_done: int, state: int = STEPPING, silent_s: float = 0.1) -> Standing:
    return Standing(state, silent_s, n_calls, n_done)


def late(shape: MeshShape, *ranks: Standing) -> list[int]:
    """Who is, when that is so for longer than anybody may be."""
    judge = Judge(shape)
    judge.late_s(ranks, 100.0)
    return [number for number, late_s in judge.late_s(ranks, 101 + LOST_S).items() if late_s > LOST_S]


@pytest.mark.parametrize("shape, ranks, found", [
    (MeshShape(2), [rank(9, 4), rank(8, 4)], [1]),  # in the middle of a step
    (MeshShape(2), [rank(9, 4), rank(9, 4)], []),
    (MeshShape(context=2), [rank(9, 4), rank(8, 4)], [1]),  # ranks that share tokens wait for one another
    (MeshShape(context=3), [rank(9, 4), rank(9, 3), rank(9, 4)], [1]),
    (MeshShape(2), [rank(0, 5, IDLE), rank(0, 4, IDLE)], [1]),  # its device, in a captured step
    (MeshShape(1, 3), [rank(0, 6), rank(0, 5), rank(0, 4)], [1, 2]),  # each has rows of the stage before it
    (MeshShape(1, 3), [rank(0, 6), rank(0, 4), rank(0, 4)], [1]),  # the last one waits
    (MeshShape(1, 3), [rank(0, 5), rank(0, 5), rank(0, 5)], []),
    (MeshShape(2, 2), [rank(9, 5), rank(9, 5), rank(7, 4), rank(8, 4)], [2]),  # rank 3 waits for it
    (MeshShape(2, 2), [rank(9, 5), rank(9, 4), rank(7, 4), rank(7, 4)], [1]),  # it has not sent them all
    (MeshShape(2), [rank(9, 4), rank(8, 4, READY, 99.0)], []),  # it loads
    (MeshShape(2), [rank(9, 4), rank(9, 4, IDLE, 99.0)], [1]),  # it is stopped
])  # fmt: skip
def test_who_is_late(shape: MeshShape, ranks: list[Standing], found: list[int]) -> None:
    assert late(shape, *ranks) == found


def test_a_rank_that_moves_is_not_late_however_far_behind() -> None:
    judge = Judge(MeshShape(1, 2))
    for second in range(20):
        found = judge.late_s([rank(0, 100), rank(0, second)], float(second))
        assert found[1] < 1


def test_a_step_that_ends_nowhere_is_seen() -> None:
    judge, at = Judge(MeshShape(2)), [rank(0, 5, IDLE), rank(0, 5, IDLE)]
    assert judge.stuck(at, 5, 199.9) == []
    assert judge.stuck(at, 6, 200.0) == [], "it has just begun"
    assert judge.stuck(at, 6, 201.0 + STUCK_S) == [0, 1]
    assert judge.stuck([at[0], rank(0, 4, IDLE)], 6, 202.0 + STUCK_S) == [1]
    assert judge.stuck([at[0], rank(0, 5)], 6, 300.0) == [], "a host is at work, as where kernels are built"
    assert judge.stuck([rank(0, 6, IDLE), at[1]], 6, 400.0) == []


def test_done_steps_are_counted_without_a_wait() -> None:
    passed: list[bool] = []
    done = DoneSteps(lambda: passed.pop)
    for _ in range(3):
        done.launched()
    passed += [False, True, True]
    assert done.count() == 2
    passed.append(True)
    assert done.count() == 3 and done.count() == 3


class Step:
    def __init__(self, number: int, then: Callable[[], None] = lambda: None) -> None:
        self._number, self._then = number, then

    def result(self) -> StepResult:
        self._then()
        return StepResult(self._number, [self._number] * self._number)


def test_results_come_back() -> None:
    fd, bell = make_memory(N_ENDS), os.eventfd(0)
    failed: list[Exception] = []
    gone: list[EngineError] = []

    def check() -> None:
        if gone:
            raise gone[0]

    writer, reader = ResultWriter(fd, os.dup(bell), failed.append), ResultReader(fd, bell, check)
    assert not reader.has(0)
    for number in range(5):
        writer.put(Step(number))
    assert reader.get(3, 5.0).tokens == [3, 3, 3] and reader.has(2) and not reader.has(5)
    writer.put(Step(200_000))  # longer than the ring
    assert len(reader.get(200_000, 30.0).tokens) == 200_000
    with pytest.raises(TimeoutError):
        reader.get(6, 0.05)
    gone.append(EngineError("all are gone"))
    with pytest.raises(EngineError, match="all are gone"):
        reader.get(6, None)

    def fail() -> None:
        raise ValueError("no")

    writer.put(Step(6, fail))
    end_s = time.monotonic() + 5
    while not failed and time.monotonic() < end_s:
        time.sleep(0.01)
    assert str(failed[0]) == "no"
    os.close(fd)
