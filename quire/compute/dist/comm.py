"""`Comm`: a rank among the ranks of one model, and what it can ask of them. `SoloComm` is the rank that is alone.

Owns the protocol. Does not own how ranks are started, nor what is cut among them.
Invariant: every rank makes the same calls in the same order, with tensors of one shape and dtype.
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch


@enum.unique
class Reduction(enum.Enum):
    """What becomes of the values that ranks have at one place of a tensor."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Comm(Protocol):
    """One rank's end."""

    @property
    def rank(self) -> int:
        """0 <= rank < size."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        """x, contiguous, with the values of all ranks reduced in place; the same bits on every rank. Returns x."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x, contiguous, of each rank → [size, *x.shape], in the order of ranks; the same bits on every rank."""
        ...

    def close(self) -> None:
        """Leave the group, as all do, when no captured step holds its calls. Nothing may be asked afterwards."""
        ...


class Sent(Protocol):
    """A tensor on its way, which is to stay as it is until somebody has waited."""

    def wait(self) -> object:
        """Until it is sent, or there; of tensors on a GPU what is queued there afterwards waits, not the host."""
        ...


class MeetingComm(Comm, Protocol):
    """`Comm` of several processes. They meet at `join`, or when something is first asked of it."""

    n_calls: int
    """That this rank has begun: a rank that hangs is behind the others. Replays of captured steps do not count."""

    def join(self) -> None:
        """Returns when all are there. RuntimeError if they are not in time."""
        ...

    def exchange(self, x: torch.Tensor, to: int, found: torch.Tensor, source: int) -> Sent:
        """Begin to send x to one rank, and to take into `found` what another one sends to this one meanwhile; both
        contiguous. Every rank calls it, so that each is sent to once."""
        ...

    def send(self, x: torch.Tensor, to: int) -> Sent:
        """Begin to send x, contiguous, to another rank, which receives in the order in which is sent."""
        ...

    def receive(self, x: torch.Tensor, source: int) -> Sent:
        """Take what another rank sends into x, contiguous, of the same shape and dtype. It is posted now, or when it is
        waited for, as the `Comm` likes; so every receive is to be waited for, in the order of calls."""
        ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """x, contiguous, [size, *shape] of each rank → [*shape], the sum over ranks of what each has for this one."""
        ...

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows of x, contiguous, so many to each rank in their order → so many from each, in the order of ranks."""
        ...

    def all_within(self, limit_s: float) -> bool:
        """Whether every rank asks this too, in so much time. If not, nothing may be asked afterwards."""
        ...

    def abort(self) -> None:
        """Another rank is gone: end what waits for it, in whatever thread. What was to come of it is void, and nothing
        may be asked afterwards but `close`, which then waits for nobody."""
        ...


class SoloComm:
    """`Comm` of the only rank: nothing is sent."""

    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        """x as it is."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x as it is, under one more dimension."""
        return x[None]

    def close(self) -> None:
        """There is no group."""
