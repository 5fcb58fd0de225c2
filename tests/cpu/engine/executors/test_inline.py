"""The compute thread: which steps are made ready before their turn, and that all of them run in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from quire.core.plan import Spans, StepPlan
from quire.core.result import StepResult
from quire.engine.executors.inline import ThreadExecutor


class Step:
    """Launched by the thread, or ready; its token says which."""

    def __init__(self, device: Device, plan: StepPlan, token: int) -> None:
        self._device, self._step, self._token = device, plan.step, token
        self.n_hurries = 0

    def compute(self) -> None:
        assert self._device.gate.wait(20)
        self._device.computed.append(self._step)

    def hurry(self) -> None:
        self.n_hurries += 1

    def result(self) -> StepResult:
        return StepResult(self._step, [self._token], [1])


LAUNCHED, READY = 1, 2
BAD_SLOT = 7


class Device:
    """Computes nothing while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.computed: list[int] = []
        self.ready: list[Step] = []
        self.executor = ThreadExecutor(self, self.prepare)

    def launch(self, plan: StepPlan) -> Step:
        if plan.closed == [BAD_SLOT]:
            raise ValueError("cannot be closed")
        step = Step(self, plan, LAUNCHED)
        step.compute()
        return step

    def prepare(self, plan: StepPlan) -> Step | None:
        if plan.copies == ["broken"]:
            raise ValueError("cannot be prepared")
        if not plan.spans.wants[0]:
            return None
        self.ready.append(Step(self, plan, READY))
        return self.ready[-1]


@pytest.fixture
def device() -> Iterator[Device]:
    found = Device()
    yield found
    found.gate.set()
    found.executor.shutdown()


def plan(step: int, *, wants: bool = True, **changes: object) -> StepPlan:
    return StepPlan(step, Spans([0], [step], [1], [0], [wants]), 1, **changes)


def test_a_step_behind_one_that_changes_slots_waits_until_that_is_computed(device: Device) -> None:
    opening = device.executor.submit(plan(0, closed=[3]))
    behind = device.executor.submit(plan(1))
    assert not opening.done() and not device.ready
    device.gate.set()
    assert opening.result(20).tokens == [LAUNCHED] and behind.result(20).tokens == [LAUNCHED]
    after = device.executor.submit(plan(2))
    assert after.result(20).tokens == [READY]
    assert device.computed == [0, 1, 2]


def test_nothing_is_made_ready_behind_a_failed_change_of_slots(device: Device) -> None:
    device.gate.set()
    with pytest.raises(ValueError, match="cannot be closed"):
        device.executor.submit(plan(0, closed=[BAD_SLOT])).result(20)
    assert device.executor.submit(plan(1)).result(20).tokens == [LAUNCHED] and not device.ready
    assert device.executor.submit(plan(2, closed=[3])).result(20).tokens == [LAUNCHED]
    assert device.executor.submit(plan(3)).result(20).tokens == [READY]


def test_steps_that_are_ready_and_others_run_in_order(device: Device) -> None:
    steps = [device.executor.submit(plan(i, wants=i != 1)) for i in range(4)]
    assert len(device.ready) == 3 and not any(step.done() for step in steps)
    with pytest.raises(TimeoutError):
        steps[0].result(0.01)
    device.gate.set()
    assert [step.result(20).tokens for step in steps] == [[READY], [LAUNCHED], [READY], [READY]]
    assert device.computed == [0, 1, 2, 3]


def test_a_step_is_hurried_once_its_result_is_waited_for(device: Device) -> None:
    step = device.executor.submit(plan(0))
    assert device.ready[0].n_hurries == 0
    with pytest.raises(TimeoutError):
        step.result(0.01)
    assert device.ready[0].n_hurries == 1


def test_a_step_that_cannot_be_made_ready_fails_alone(device: Device) -> None:
    device.gate.set()
    with pytest.raises(ValueError, match="cannot be prepared"):
        device.executor.submit(plan(0, copies=["broken"])).result(20)
    assert device.executor.submit(plan(1)).result(20).tokens == [READY]
