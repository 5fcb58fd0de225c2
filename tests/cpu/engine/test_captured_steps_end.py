"""Captured steps end with the engine: NCCL waits for those that hold its calls when a group of ranks ends."""

from __future__ import annotations

import gc
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from calling_device import CallingDevice, LivePlans
from rank_cases import SIZE, answers, checkpoint

from quire import LLM
from quire.compute import platform
from quire.compute.platform import CudaPlatform
from quire.core.plan import Spans, StepMasks, StepPlan
from quire.engine import workers
from quire.engine.garbage import thawed
from quire.engine.ranks.rank import Rank

Alive = list[weakref.ref[Callable[[], None]]]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    """Replays that were captured; of engines whose device launches, and captures, as a GPU does."""
    found: Alive = []

    class Device(CallingDevice):
        def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
            replay = super().capture(launches)
            found.append(weakref.ref(replay))
            return replay

    LivePlans(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", Device)
    monkeypatch.setattr(workers, "platform_of", lambda config, rank: CudaPlatform())
    return found


@pytest.fixture
def is_frozen() -> Iterator[None]:
    """Afterwards all is frozen again that other tests keep."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("is_frozen")
def test_none_outlives_the_engine(alive: Alive, tmp_path: pathlib.Path) -> None:
    """Neither by a step that gets no masks any more, as every request has ended, nor asleep in a server."""
    llm = LLM(checkpoint("qwen3", tmp_path / "qwen3"), **SIZE, enable_sleep_mode=True)
    said = answers(llm)
    llm.sleep(1)
    assert len(alive) > 10 and not [one for one in alive if one() is not None]
    llm.wake_up()
    gc.freeze()  # as a server does when it is ready
    assert answers(llm) == said
    with thawed():
        llm.shutdown()
    assert not [one for one in alive if one() is not None]


@pytest.mark.usefixtures("alive")
def test_a_step_that_waits_for_masks_gets_some_when_the_engine_ends(tmp_path: pathlib.Path) -> None:
    """The first of several stages has begun to receive its tokens: a GPU could not end before they come."""
    llm = LLM(checkpoint("qwen3", tmp_path / "qwen3"), **SIZE)
    executor = llm.engine.executor
    masked, mask = set[int](), executor.mask

    def recorded(masks: StepMasks) -> None:
        masked.add(masks.step)
        mask(masks)

    executor.mask = recorded  # type: ignore[method-assign]
    answers(llm)
    left = {plan.step for plan, _, _ in llm.engine._in_flight if plan.masked}
    assert left and not left <= masked
    llm.shutdown()
    assert left <= masked


class Masked:
    """A step that waits for masks."""


class Worker:
    """Stands for one: only its last call is looked at."""

    platform = adapters = None

    def __init__(self) -> None:
        self.left: list[Any] = []
        self.launched: weakref.ref[Masked] | None = None

    def launch(self, plan: StepPlan) -> Masked:
        step = Masked()
        self.launched = weakref.ref(step)
        return step

    def close(self) -> None:
        assert self.launched is not None
        self.left.append(self.launched())


class Counted:
    """Stands for `DoneSteps`."""

    def launched(self) -> None:
        """Counts nothing."""


def test_a_rank_drops_a_step_without_masks_before_its_memory() -> None:
    worker: Any = Worker()
    done: Any = Counted()
    adapters: Any = None
    rank = Rank(worker, done, None, None, adapters)
    rank.do(StepPlan(1, Spans([0], [0], [1], [0], [True]), 1, masked=[0]))
    assert worker.launched() is not None
    rank.close()
    assert worker.left == [None]
