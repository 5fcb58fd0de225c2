"""When experts are rearranged: between which plans ranks hear of it, rank 0 and the others in one order."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable

import pytest

from quire.config.eplb import EplbConfig
from quire.core.balance import BalanceStage
from quire.core.events import EndKind
from quire.core.plan import StepMasks, StepPlan
from quire.core.result import StepResult
from quire.engine.executors.balancing import BalancingExecutor
from quire.engine.executors.executor import RanksLost
from quire.engine.ranks.wire import BalanceExperts, decode, encode
from quire.engine.sleep import AsleepExecutor

MARK, PLAN, MOVE = BalanceStage.MARK, BalanceStage.PLAN, BalanceStage.MOVE
LOSS = RanksLost("rank 1 is gone", EndKind.KILLED)


class Rig(AsleepExecutor):
    """Ranks that write down what they hear, and what rank 0 does; its work waits where it has a thread."""

    def __init__(self, window: int, interval: int, n_layers: int = 2, *, threaded: bool = False) -> None:
        self.heard: list[int | BalanceStage] = []
        self.done: list[BalanceStage] = []
        self.waiting: collections.deque[Callable[[], None]] = collections.deque()
        self.n_layers, self.n_pending, self.threaded = n_layers, 0, threaded
        self.error: Exception | None = None
        self.causes: list[Exception] = []
        self.is_lost = False
        eplb = EplbConfig(window_size=window, step_interval=interval)
        self.executor = BalancingExecutor(self, self.in_turn, self, self, eplb)

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        self.heard.append(plan.step)
        return concurrent.futures.Future()

    def say(self, said: BalanceExperts) -> None:
        if self.is_lost:
            raise LOSS
        self.heard.append(said.stage)

    def cause(self, error: Exception) -> RanksLost:
        self.causes.append(error)
        return LOSS

    def in_turn(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)
        if not self.threaded:
            self.catch_up()

    def catch_up(self) -> None:
        while self.waiting:
            self.waiting.popleft()()

    def do(self, stage: BalanceStage) -> None:
        if self.error is not None:
            raise self.error
        self.done.append(stage)
        self.n_pending = {MARK: self.n_pending, PLAN: self.n_layers, MOVE: self.n_pending - 1}[stage]

    def rest(self) -> None:
        self.n_pending = 0

    def steps(self, first: int, end: int) -> None:
        for step in range(first, end):
            self.executor.submit(StepPlan(step, []))


def test_a_window_then_a_choice_then_a_layer_between_two_steps() -> None:
    rig = Rig(window=2, interval=5)
    rig.steps(0, 11)
    assert rig.heard == [0, 1, 2, MARK, 3, 4, PLAN, 5, MOVE, 6, MOVE, 7, MARK, 8, 9, PLAN, 10]
    assert rig.done == [one for one in rig.heard if isinstance(one, BalanceStage)]


def test_a_window_as_long_as_the_interval_begins_where_the_last_ends() -> None:
    rig = Rig(window=3, interval=3, n_layers=1)
    rig.steps(0, 7)
    assert rig.heard == [MARK, 0, 1, 2, PLAN, MARK, 3, MOVE, 4, 5, PLAN, MARK, 6]


def test_no_layer_is_moved_before_rank_0_has_chosen() -> None:
    rig = Rig(window=1, interval=3, threaded=True)
    rig.steps(0, 5)
    assert rig.heard == [0, 1, MARK, 2, PLAN, 3, 4]
    rig.catch_up()
    rig.steps(5, 9)
    assert rig.heard[7:] == [MOVE, MARK, 5, MOVE, 6, 7, MARK, 8]
    rig.catch_up()
    assert rig.done == [MARK, PLAN, MOVE, MARK, MOVE, MARK]


def test_what_was_chosen_is_moved_before_there_is_a_new_choice() -> None:
    rig = Rig(window=1, interval=1)
    rig.steps(0, 6)
    assert rig.heard == [MARK, 0, PLAN, MARK, 1, MOVE, MARK, 2, MOVE, MARK, 3, PLAN, MARK, 4, MOVE, MARK, 5]


def test_nothing_is_begun_while_a_step_waits_for_its_masks() -> None:
    rig = Rig(window=1, interval=2, n_layers=1)
    rig.executor.submit(StepPlan(0, []))
    rig.executor.submit(StepPlan(1, [], masked=[0]))
    rig.executor.submit(StepPlan(2, []))
    assert rig.heard == [0, MARK, 1, 2], "its masks have not come"
    rig.executor.mask(StepMasks(1, memoryview(b"")))
    rig.executor.submit(StepPlan(3, []))
    assert rig.heard[4:] == [PLAN, MARK, 3]
    rig = Rig(window=1, interval=2, n_layers=1)
    rig.executor.submit(StepPlan(0, [], masked=[0]))
    rig.executor.mask(StepMasks(0, memoryview(b"")))
    rig.executor.submit(StepPlan(1, []))
    assert rig.heard == [0, MARK, 1]


def test_what_fails_on_rank_0_ends_all_and_the_next_step_says_so() -> None:
    rig = Rig(window=1, interval=2)
    rig.error = MemoryError("no room")
    rig.steps(0, 2)
    assert rig.causes == [rig.error]
    rig.is_lost = True
    with pytest.raises(RanksLost, match="rank 1 is gone"):
        rig.executor.submit(StepPlan(2, [])).result(0)


def test_nothing_is_left_to_be_moved_behind_sleep() -> None:
    rig = Rig(window=1, interval=3, n_layers=3)
    rig.steps(0, 5)
    assert rig.done == [MARK, PLAN, MOVE] and rig.n_pending == 2
    rig.executor.shutdown()
    assert rig.n_pending == 0


@pytest.mark.parametrize("stage", BalanceStage)
def test_the_order_travels(stage: BalanceStage) -> None:
    assert decode(encode(BalanceExperts(stage))) == BalanceExperts(stage)
