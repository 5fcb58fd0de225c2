"""Which rank is blamed: the one that others wait for, never one that waits; and results come back in their own ring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from quire.config.mesh import Mesh
from quire.core.errors import EngineError
from quire.core.result import StepResult
from quire.engine.ranks.done import DoneSteps
from quire.engine.ranks.judge import LOST_S, STUCK_S, Judge
from quire.engine.ranks.results import N_ENDS, ResultReader, ResultWriter
from quire.engine.ranks.ring import IDLE, ORDERED, READY, STEPPING, Standing, make_memory


def rank(n_calls: int, n_done: int, state: int = STEPPING, silent_s: float = 0.1, n_unread: int = 0) -> Standing:
    return Standing(state, silent_s, n_calls, n_done, 100, n_unread)


def late(shape: Mesh, *ranks: Standing) -> list[int]:
    """Who is, when that is so for longer than anybody may be."""
    judge = Judge(shape)
    judge.late_s(ranks, 100.0)
    return [number for number, late_s in judge.late_s(ranks, 101 + LOST_S).items() if late_s > LOST_S]


@pytest.mark.parametrize("shape, ranks, found", [
    (Mesh(tp=2), [rank(9, 4), rank(8, 4)], [1]),  # in the middle of a step
    (Mesh(tp=2), [rank(9, 4), rank(9, 4)], []),
    (Mesh(sp=2), [rank(9, 4), rank(8, 4)], [1]),  # ranks that share tokens wait for one another
    (Mesh(ring=3), [rank(9, 4), rank(9, 3), rank(9, 4)], [1]),
    (Mesh(tp=2), [rank(0, 5, IDLE), rank(0, 4, IDLE)], [1]),  # its device, in a captured step
    (Mesh(pp=3), [rank(0, 6), rank(0, 5), rank(0, 4)], [1, 2]),  # each has rows of the stage before it
    (Mesh(pp=3), [rank(0, 6), rank(0, 4), rank(0, 4)], [1]),  # the last one waits
    (Mesh(pp=3), [rank(0, 5), rank(0, 5), rank(0, 5)], []),
    (Mesh(tp=2, pp=2), [rank(9, 5), rank(9, 5), rank(7, 4), rank(8, 4)], [2]),  # rank 3 waits for it
    (Mesh(tp=2, pp=2), [rank(9, 5), rank(9, 4), rank(7, 4), rank(7, 4)], [1]),  # it has not sent them all
    (Mesh(tp=2), [rank(9, 4), rank(8, 4, READY, 99.0)], []),  # it loads
    (Mesh(dp=2), [rank(9, 4), rank(3, 4)], []),  # data-parallel ranks call on their own
    (Mesh(dp=2), [rank(0, 5, IDLE), rank(3, 4)], []),  # it has a long prompt
    (Mesh(dp=2), [rank(0, 5, IDLE), rank(3, 4, IDLE)], []),  # its device may be at a step of its own for long
    (Mesh(dp=2, ep=2), [rank(9, 4), rank(8, 4)], [1]),  # rows do
    (Mesh(tp=2, dp=2), [rank(9, 4), rank(9, 4), rank(3, 4), rank(2, 4)], [3]),  # its fellow waits for it
    (Mesh(tp=2), [rank(9, 4), rank(9, 4, IDLE, 99.0)], [1]),  # it is stopped
    (Mesh(tp=2), [rank(9, 4), rank(9, 4, IDLE, n_unread=40)], [1]),  # it does not listen
    (Mesh(tp=2), [rank(9, 4), rank(9, 4, n_unread=40)], []),  # it is at the step before
])  # fmt: skip
def test_who_is_late(shape: Mesh, ranks: list[Standing], found: list[int]) -> None:
    assert late(shape, *ranks) == found


def test_a_data_parallel_rank_has_time_for_its_own_steps_and_no_more() -> None:
    """At a step on its host, and on its device; one that goes on is never late."""
    for ranks in ([rank(9, 5, IDLE), rank(3, 4)], [rank(9, 5, IDLE), rank(3, 4, IDLE)]):
        judge = Judge(Mesh(dp=2))
        judge.step_s = 100.0
        limit_s = 100.0 if ranks[1].state == STEPPING else STUCK_S
        judge.late_s(ranks, 1000.0)
        assert judge.late_s(ranks, 999.0 + limit_s)[1] < LOST_S < judge.late_s(ranks, 1001.0 + limit_s)[1]
        going_on = [ranks[0], rank(4, 4, ranks[1].state)]
        assert judge.late_s(going_on, 1002.0 + limit_s)[1] < LOST_S


def test_a_rank_at_an_order_has_time_and_no_more() -> None:
    """Capturing steps takes one longer than another; one that hangs there, while rank 0 goes on, is seen."""
    for n_unread, found in ((40, [False, True]), (0, [False, False])):
        judge, ranks = Judge(Mesh(tp=2)), [rank(9, 4), rank(9, 4, ORDERED, n_unread=n_unread)]
        judge.late_s(ranks, 100.0)
        late_s = [judge.late_s(ranks, 100.0 + since_s)[1] for since_s in (STUCK_S - 1, STUCK_S + 1)]
        assert [seconds > LOST_S for seconds in late_s] == found


def test_a_rank_that_moves_is_not_late_however_far_behind() -> None:
    judge = Judge(Mesh(tp=1, pp=2))
    for second in range(20):
        found = judge.late_s([rank(0, 100), rank(0, second)], float(second))
        assert found[1] < 1


def test_a_rank_that_reads_what_it_is_told_is_not_late() -> None:
    judge = Judge(Mesh(tp=2))
    for second in range(20):
        found = judge.late_s([rank(9, 4), Standing(IDLE, 0.1, 9, 4, second, 40)], float(second))
        assert found[1] < 1


def test_a_step_that_ends_nowhere_is_seen() -> None:
    judge, at = Judge(Mesh(tp=2)), [rank(0, 5, IDLE), rank(0, 5, IDLE)]
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
    reader.wait(3, 5.0)
    assert reader.take(3).tokens == [3, 3, 3] and reader.has(2) and not reader.has(5)
    writer.put_loads([[1, 2], [3, 4]])
    writer.put(Step(200_000))  # longer than the ring
    reader.wait(200_000, 30.0)
    assert len(reader.take(200_000).tokens) == 200_000 and reader.has(4)
    assert reader.has_loads(1.0) and reader.take_loads() == [[1, 2], [3, 4]]
    assert not reader.has_loads(0.0)
    with pytest.raises(TimeoutError):
        reader.wait(6, 0.05)
    gone.append(EngineError("all are gone"))
    with pytest.raises(EngineError, match="all are gone"):
        reader.wait(6, None)

    def fail() -> None:
        raise ValueError("no")

    writer.put(Step(6, fail))
    end_s = time.monotonic() + 5
    while not failed and time.monotonic() < end_s:
        time.sleep(0.01)
    assert str(failed[0]) == "no"
    os.close(fd)
