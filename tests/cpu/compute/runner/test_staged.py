"""Stages of a pipeline, one after the other in this thread: what the last one says is what one rank says, bit for bit.

Steps are kernel by kernel, and as graphs on a device whose graphs are calls. `tests/dist` has processes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import pathlib
import time
import weakref
from typing import Any

import pytest
import torch
import worker_rank
from calling_device import CallingDevice, LivePlans
from worker_rank import make_worker, masks_of, plans, values

from quire.compute import platform
from quire.compute.dist.pipeline import Link, Pipeline
from quire.compute.platform import CudaPlatform
from quire.compute.runner.staged import StageRunner
from quire.compute.worker import Allocation, Worker
from quire.config.mesh import Mesh

SENDER, MOST_SENT = 0, 3


class Arrival:
    """A message that is there when somebody waits for it, or comes from another thread."""

    def __init__(self, queue: collections.deque[torch.Tensor], target: torch.Tensor) -> None:
        self._queue, self._target = queue, target

    def wait(self) -> None:
        deadline_s = time.monotonic() + 60
        while not self._queue and time.monotonic() < deadline_s:
            time.sleep(0.001)
        found = self._queue.popleft()
        assert found.shape == self._target.shape and found.dtype == self._target.dtype
        self._target.copy_(found)


class Gone:
    def wait(self) -> None: ...


class QueueComm:
    """One end of a link within this process."""

    n_calls = 0

    def __init__(self, rank: int, size: int, queue: collections.deque[torch.Tensor]) -> None:
        self.rank, self.size, self.queue = rank, size, queue

    def send(self, x: torch.Tensor, to: int) -> Gone:
        assert self.rank == SENDER
        self.queue.append(x)
        return Gone()

    def receive(self, x: torch.Tensor, source: int) -> Arrival:
        assert source == SENDER != self.rank
        return Arrival(self.queue, x)


@pytest.fixture(autouse=True)
def four_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(worker_rank.CONFIG, "num_hidden_layers", 5)
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(platform.cuda, "n_devices", lambda: 1)


def stages_of(folder: pathlib.Path, n_stages: int, captures: bool) -> list[Worker]:
    """Workers that send to one another, the first first."""
    queues = collections.defaultdict[str, collections.deque[torch.Tensor]](collections.deque)

    def connect(rank: int, size: int, meeting_point: str) -> Any:
        return QueueComm(rank, size, queues[meeting_point])

    shape = Mesh(pp=n_stages)
    made = [
        make_worker(
            folder,
            platform=CudaPlatform(captures=captures),
            dtype="float32",
            pipeline=Pipeline(shape, rank, connect, connect, "at", MOST_SENT),
        )
        for rank in range(n_stages)
    ]
    for worker in made:
        worker.load()
    return made


def allocate(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first step, in which ranks would wait for one another."""
    with monkeypatch.context() as patch:
        patch.setattr("quire.compute.worker.warm_up", lambda *args: None)
        for worker in workers:
            worker.allocate(Allocation(12, 128))


def said(workers: list[Worker]) -> list[dict[str, Any]]:
    """What the last of them says of each plan."""
    return [[values(worker.run(plan, masks_of(plan))) for worker in workers][-1] for plan in plans()]


@pytest.mark.parametrize("n_stages, captures", [(2, False), (4, True)])
def test_the_last_stage_says_what_one_rank_says(
    n_stages: int, captures: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LivePlans(monkeypatch)
    whole = make_worker(tmp_path, platform=CudaPlatform(captures=captures), dtype="float32")
    whole.load()
    whole.allocate(Allocation(12, 128))
    workers = stages_of(tmp_path, n_stages, captures)
    assert sum(worker.arch.n_layers for worker in workers) == 5
    assert sum(worker.model.n_bytes for worker in workers) < whole.model.n_bytes * 1.4, "a tied head is there twice"
    allocate(workers, monkeypatch)
    expected = said([whole])
    assert expected[1]["tokens"] and said(workers) == expected
    assert captures or all(worker.n_begun >= len(plans()) * worker.arch.n_layers for worker in workers)
    first = workers[0].runner
    assert isinstance(first, StageRunner)
    mine, theirs = (runner.tables.tokens[0, :44] for runner in (first, whole.runner))
    assert not torch.equal(mine, theirs), "tokens of the last steps wait"
    first.take_all()
    assert torch.equal(mine, theirs), "all tokens came back"


def test_stages_warm_up_together(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of every alignment, two prompts at once, forks and masks: what they say then is what one rank says."""
    LivePlans(monkeypatch)
    whole = make_worker(tmp_path, platform=CudaPlatform(captures=False), dtype="float32")
    whole.load()
    whole.allocate(Allocation(12, 128))
    workers = stages_of(tmp_path, 2, captures=False)
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: worker.allocate(Allocation(12, 128)), workers))
    assert all(worker.n_begun >= 14 * worker.arch.n_layers for worker in workers)
    assert said(workers) == said([whole])


def test_a_token_of_a_slot_that_was_closed_is_nobodys(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = stages_of(tmp_path, 2, captures=False)
    allocate(workers, monkeypatch)
    first = workers[0].runner
    assert isinstance(first, StageRunner)
    for plan in plans()[:2]:
        for worker in workers:
            worker.run(plan)
    first.tables.tokens[1] = 77  # as another sequence would have it
    first.close(1)
    first.take_all()
    assert first.tables.tokens[1].eq(77).all() and not first.tables.tokens[0, 40].eq(77)


def test_a_link_keeps_no_more_than_steps_are_in_flight() -> None:
    """And waits for a message only when as many came after it."""
    waited: list[int] = []

    class Sent:
        def __init__(self, number: int) -> None:
            self._number = number

        def wait(self) -> None:
            waited.append(self._number)

    class Comm:
        def send(self, x: torch.Tensor, to: int) -> Sent:
            alive.append(weakref.ref(x))
            return Sent(int(x[0]))

    alive: list[weakref.ref[torch.Tensor]] = []
    connect: Any = lambda rank, size, meeting_point: Comm()  # noqa: E731
    link = Link(connect, SENDER, "at", most_sent=MOST_SENT)
    for number in range(MOST_SENT + 2):
        link.send(torch.full((2,), number))
        assert sum(one() is not None for one in alive) == min(number + 1, MOST_SENT)
    assert waited == [0, 1]
