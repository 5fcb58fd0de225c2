"""`Pipeline`: a rank's stage, the ranks that it shares layers with, and its ends of the links between stages.

Owns the groups of a rank beside that of all ranks, and what is on its way. Does not own what is sent when
(`runner/stages`), nor how groups speak (`gloo`, `nccl`).
Invariants: each link has two ranks, the same place in two stages, and one direction, so that no message waits for one
of the other direction; what is sent is a copy, so nobody who sends waits for who receives; of more steps than may be in
flight none is kept.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch

from quire.compute.dist.comm import MeetingComm, Sent
from quire.config.mesh import Mesh

_SENDER, _RECEIVER = range(2)

Connect = Callable[[int, int, str], MeetingComm]
"""(rank, size, meeting point) → a rank of a group, see `Platform`."""


class Link:
    """One end of a way from one rank to another."""

    def __init__(self, connect: Connect, end: int, meeting_point: str, most_sent: int) -> None:
        """most_sent: messages that are kept until they are taken for received, each of one step."""
        self._comm, self._most_sent = connect(end, 2, meeting_point), most_sent
        self._sent: collections.deque[tuple[Sent, torch.Tensor]] = collections.deque()

    def join(self) -> None:
        """Returns when both are there."""
        self._comm.join()

    def send(self, x: torch.Tensor) -> None:
        """A copy of it; returns at once where the step of `most_sent` before has its result."""
        while len(self._sent) >= self._most_sent:
            self._sent.popleft()[0].wait()
        copy = x.clone()
        self._sent.append((self._comm.send(copy, _RECEIVER), copy))

    def receive(self, x: torch.Tensor) -> Sent:
        """The next message into x, see `MeetingComm.receive`."""
        return self._comm.receive(x, _SENDER)

    def abort(self) -> None:
        """See `MeetingComm`."""
        self._comm.abort()

    def close(self) -> None:
        """Leave."""
        self._sent.clear()
        self._comm.close()


class Pipeline:
    """Of one rank."""

    def __init__(
        self, shape: Mesh, rank: int, connect: Connect, share: Connect, meeting_point: str, most_sent: int
    ) -> None:
        """connect: to another stage; share: with those of this rank's. meeting_point: path of a file that is not there,
        as those that begin like it are not. most_sent: steps in flight, at most."""
        self.stage, self.n_stages, self.most_sent = shape.stage_of(rank), shape.pp, most_sent
        place = shape.place_in_stage(rank)
        self._met: list[MeetingComm | Link] = []
        """In an order in which all ranks can meet."""
        self.sharing: MeetingComm | None = None
        """With the ranks that share its layers; None: there are none."""
        if shape.tp > 1:
            self.sharing = share(place, shape.tp, f"{meeting_point}-stage-{self.stage}")
            self._met.append(self.sharing)

        def link(source: int, end: int) -> Link:
            made = Link(connect, end, f"{meeting_point}-from-{source}-{place}", most_sent)
            self._met.append(made)
            return made

        self.before = link(self.stage - 1, _RECEIVER) if self.stage else None
        """From the stage before; None: this is the first."""
        is_last = self.stage == self.n_stages - 1
        self.after = None if is_last else link(self.stage, _SENDER)
        """To the stage after it; None: this is the last."""
        self.back: Link | None = None
        """From the last stage to the first."""
        if is_last or not self.stage:
            self.back = link(self.n_stages - 1, _SENDER if is_last else _RECEIVER)

    def join(self) -> None:
        """Returns when all are there."""
        for one in self._met:
            one.join()

    def abort(self) -> None:
        """See `MeetingComm`."""
        for one in self._met:
            one.abort()

    def close(self) -> None:
        """Leave every group."""
        for one in self._met:
            one.close()
