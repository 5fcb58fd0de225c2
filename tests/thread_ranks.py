"""Ranks that are threads of one process: `MeetingComm` without processes, which counts what each rank sends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from quire.compute.dist.comm import Reduction

TIMEOUT_S: Final = 60.0
T = TypeVar("T")


class ThreadGroup:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=TIMEOUT_S)
        self.slots: list[Any] = [None] * size
        self._inner: dict[str, ThreadGroup] = {}
        self._lock = threading.Lock()
        self.links = {(a, b): queue.Queue[torch.Tensor]() for a in range(size) for b in range(size)}

    def inner(self, meeting_point: str, size: int) -> ThreadGroup:
        """The one that meets there, of some of the threads."""
        with self._lock:
            return self._inner.setdefault(meeting_point, ThreadGroup(size))

    def abort(self) -> None:
        """Nobody waits any longer."""
        for one in (self, *self._inner.values()):
            one.barrier.abort()


class Arrival:
    """`Sent` of what another thread sends."""

    def __init__(self, link: queue.Queue[torch.Tensor], x: torch.Tensor) -> None:
        self._link, self._x = link, x

    def wait(self) -> None:
        self._x.copy_(self._link.get(timeout=TIMEOUT_S))


class ThreadComm:
    """One rank."""

    def __init__(self, rank: int, group: ThreadGroup) -> None:
        self.rank, self.size, self.n_calls = rank, group.size, 0
        self._group = group
        self.sent_bytes: dict[str, int] = {}
        """By call: what has left this rank."""

    def connect(self, rank: int, size: int, meeting_point: str) -> ThreadComm:
        """A rank of a group of some; what it sends counts here."""
        made = ThreadComm(rank, self._group.inner(meeting_point, size))
        made.sent_bytes = self.sent_bytes
        return made

    def _count(self, name: str, n_bytes: int) -> None:
        self.n_calls += 1
        self.sent_bytes[name] = self.sent_bytes.get(name, 0) + n_bytes

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        group = self._group
        group.slots[self.rank] = x
        group.barrier.wait()
        found = [one.clone() for one in group.slots]
        group.barrier.wait()
        return found

    def join(self) -> None:
        self._group.barrier.wait()

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        stacked = torch.stack(self._all(x))
        self._count("all_reduce", x.nbytes)
        if reduction is Reduction.SUM:
            return x.copy_(stacked.sum(0))
        return x.copy_(stacked.amin(0) if reduction is Reduction.MIN else stacked.amax(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        self._count("all_gather", (self.size - 1) * x.nbytes)
        return torch.stack(self._all(x))

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        assert x.is_contiguous() and sent == received == [1] * self.size
        self._count("all_to_all", (self.size - 1) * x[0].nbytes)
        return torch.stack([one[self.rank] for one in self._all(x)])

    def exchange(self, x: torch.Tensor, to: int, found: torch.Tensor, source: int) -> Arrival:
        assert x.is_contiguous() and found.is_contiguous()
        self._count("exchange", x.nbytes)
        self._group.links[self.rank, to].put(x.clone())
        return Arrival(self._group.links[source, self.rank], found)

    def send(self, x: torch.Tensor, to: int) -> Arrival:
        raise AssertionError("no link is used")

    def receive(self, x: torch.Tensor, source: int) -> Arrival:
        raise AssertionError("no link is used")

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self._count("reduce_scatter", (self.size - 1) * x[0].nbytes)
        return torch.stack(self._all(x))[:, self.rank].sum(0)

    def all_within(self, limit_s: float) -> bool:
        return True

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        pass


def together(size: int, live: Callable[[ThreadComm], T]) -> list[T]:
    """What the life of each rank returns. Raises what the first of them raises."""
    group = ThreadGroup(size)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = live(ThreadComm(rank, group))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
