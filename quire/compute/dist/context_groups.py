"""`ContextGroups`: the groups of a rank that shares tokens with others: who divides heads with it, whose turns follow.

Owns them beside the group of all ranks. Does not own what is sent (`runner/ulysses`, `runner/ring_context`).
Invariant: ranks that divide the heads of the same tokens are neighbours; those of one place among them make a ring.
"""

from __future__ import annotations

from quire.compute.dist.comm import MeetingComm
from quire.compute.dist.pipeline import Connect


class ContextGroups:
    """Of one rank."""

    def __init__(self, everyone: MeetingComm, degree: int, connect: Connect, meeting_point: str) -> None:
        """degree: ranks that divide heads. meeting_point: path of a file that is not there, as those that begin like it
        are not."""
        n_turns = everyone.size // degree
        turn, place = divmod(everyone.rank, degree)
        self.everyone = everyone
        self.heads, self.turns = (everyone if degree > 1 else None), (everyone if n_turns > 1 else None)
        """None: the rank is alone in that."""
        self.sharing: MeetingComm | None = None
        """See `Pipeline`: each rank has whole layers."""
        self._own: list[MeetingComm] = []
        if degree > 1 and n_turns > 1:
            self.heads = connect(place, degree, f"{meeting_point}-heads-{turn}")
            self.turns = connect(turn, n_turns, f"{meeting_point}-turns-{place}")
            self._own = [self.heads, self.turns]

    @property
    def n_calls(self) -> int:
        """That this rank has begun in all groups."""
        return self.everyone.n_calls + sum(one.n_calls for one in self._own)

    def join(self) -> None:
        """Returns when all are there; `everyone` is."""
        for one in self._own:
            one.join()

    def abort(self) -> None:
        """See `MeetingComm`; not of `everyone`, which whoever made it ends."""
        for one in self._own:
            one.abort()

    def close(self) -> None:
        """Leave the groups beside `everyone`."""
        for one in reversed(self._own):
            one.close()
