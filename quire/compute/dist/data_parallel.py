"""`DataParallel`: a rank's place among data-parallel ranks, the ranks that it shares layers with, and those that it
sends rows to where experts are divided among all.

Owns the groups of a rank beside that of all ranks. Does not own how groups speak (`gloo`, `nccl`) nor what is sent
(`exchange.py`). Invariant: without an exchange data-parallel ranks never wait for one another.
"""

from __future__ import annotations

from quire.compute.dist.comm import MeetingComm
from quire.compute.dist.exchange import Exchange
from quire.compute.dist.pipeline import Connect
from quire.config.mesh import Mesh


class DataParallel:
    """Of one rank."""

    def __init__(
        self,
        shape: Mesh,
        rank: int,
        n_slots: int,
        max_rows: int,
        comm: MeetingComm,
        share: Connect,
        meeting_point: str,
    ) -> None:
        """n_slots, max_rows: sequences of a data-parallel rank, and rows of its steps, at most; comm: of all ranks;
        share: with those of this rank's layers; meeting_point: path of a file that is not there, as those that begin
        like it are not."""
        self.dp_rank, self.size, self.n_slots = shape.dp_rank_of(rank), shape.dp, n_slots
        """n_slots: until memory has chosen fewer, see `DataParallelRunner`."""
        place = shape.place_in_stage(rank)
        self.exchange = Exchange(comm, place, shape.tp, max_rows) if shape.sends_rows else None
        """Where experts are divided among all ranks."""
        self.sharing: MeetingComm | None = None
        """With the ranks that share its layers; None: there are none."""
        if shape.tp > 1:
            self.sharing = share(place, shape.tp, f"{meeting_point}-dp-{self.dp_rank}")

    def join(self) -> None:
        """Returns when all are there."""
        if self.sharing is not None:
            self.sharing.join()

    def abort(self) -> None:
        """See `MeetingComm`."""
        if self.sharing is not None:
            self.sharing.abort()

    def close(self) -> None:
        """Leave every group."""
        if self.sharing is not None:
            self.sharing.close()
