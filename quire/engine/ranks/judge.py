"""Which ranks stand still: by their signs of life, the calls that they have begun, and the steps that they have done.

Owns the judgement. Does not own what ranks say (`ring.py`), nor what becomes of one that is lost (`group.py`).
Invariants: a rank that waits for another is not late itself; while ranks load, none is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.config.mesh import Mesh
from quire.engine.ranks.ring import IDLE, ORDERED, STEPPING, Standing

LATE_S: Final = 2.0
"""Without a sign of life, or behind the others in a step, a rank is late; `EngineStats.is_late` tells."""
LOST_S: Final = 6.0
"""And then lost."""
STUCK_S: Final = 30.0
"""All ranks have launched a step, and on no device it ends: longer than any step takes, and not the time-out of those
who wait for one another."""


class Judge:
    """Sees where all ranks are, time and again."""

    def __init__(self, shape: Mesh, stuck_s: float = 0.0) -> None:
        """stuck_s: 0: `STUCK_S`."""
        self._shape, self.stuck_s = shape, stuck_s or STUCK_S
        self.step_s = self.stuck_s
        """A host may be at a step of its own rows for so long, where no other rank waits for it."""
        self._moved: dict[int, tuple[tuple[int, ...], float]] = {}
        """Of each rank its progress when it was last seen to move, or to have no reason to, and when that was."""
        self._ended: tuple[int, float] = 0, 0.0
        """Steps that some rank has done, and when that last changed."""

    def pardon(self) -> None:
        """Nobody was watched for a while: begin anew."""
        self._moved.clear()
        self._ended = 0, 0.0

    def late_s(self, ranks: Sequence[Standing], now_s: float) -> dict[int, float]:
        """Seconds for which each rank but rank 0 has stood still by its own fault. ranks: from rank 0 on."""
        return {number: self._late_s(number, ranks, now_s) for number in range(1, len(ranks))}

    def stuck(self, ranks: Sequence[Standing], n_said: int, now_s: float) -> list[int]:
        """Ranks whose device is at a step that ends on none, though every host has launched it; usually none.

        n_said: steps that all were told of.
        """
        most, since_s = self._ended
        n_done = max(rank.n_done for rank in ranks)
        if n_done != most or n_done >= n_said or any(rank.state != IDLE for rank in ranks[1:]) or not since_s:
            self._ended = n_done, now_s
            return []
        if now_s - since_s <= self.stuck_s:
            return []
        least = min(rank.n_done for rank in ranks)
        return [number for number, rank in enumerate(ranks) if rank.n_done == least]

    def _late_s(self, number: int, ranks: Sequence[Standing], now_s: float) -> float:
        rank = ranks[number]
        if rank.state < IDLE:
            return 0.0
        progress, since_s = self._moved.get(number, (rank.progress, now_s))
        is_behind = self._is_behind(number, ranks)
        patience_s = 0.0 if is_behind else self._patience_s(number, ranks)
        if progress != rank.progress or not (is_behind or patience_s):
            progress, since_s = rank.progress, now_s
        self._moved[number] = progress, since_s
        return max(rank.silent_s, now_s - since_s - patience_s)

    def _patience_s(self, number: int, ranks: Sequence[Standing]) -> float:
        """How much longer than others a rank may stand at an order, behind which rank 0 has said more, or a
        data-parallel one at a step in which no other takes part, before it is late; 0: it has nothing to do."""
        rank = ranks[number]
        if rank.state == ORDERED and rank.n_unread:
            return max(LOST_S, self.stuck_s) - LOST_S or LATE_S
        if self._shape.dp == 1 or self._shape.sends_rows:
            return 0.0
        if rank.state == STEPPING:
            return max(LOST_S, self.step_s) - LOST_S or LATE_S
        is_waiting = rank.state == IDLE and rank.n_done < max(one.n_done for one in ranks)
        return (max(LOST_S, self.stuck_s) - LOST_S or LATE_S) if is_waiting else 0.0

    def _is_behind(self, number: int, ranks: Sequence[Standing]) -> bool:
        """Whether others wait for it: those that share its layers, or experts, or the step; or the stages after it,
        while it has what it needs of the stage before and of its fellows; or it has nothing to do, and does not take
        what rank 0 says."""
        shape, rank = self._shape, ranks[number]
        if rank.state == IDLE and rank.n_unread:
            return True
        first = number - shape.place_in_stage(number)
        beside = ranks if shape.sends_rows else ranks[first : first + shape.n_stage_ranks]
        before = ranks[first - shape.n_stage_ranks : first] if shape.stage_of(number) else ()
        if rank.state == STEPPING and rank.n_calls < max(one.n_calls for one in beside):
            return True
        if rank.n_done < max(one.n_done for one in beside):
            return True
        if shape.sends_rows and rank.state == IDLE and rank.n_done < max(one.n_done for one in ranks):
            return True  # its device
        has_rows = bool(before) and rank.n_done < min(one.n_done for one in before)
        return has_rows and rank.n_calls == min(one.n_calls for one in beside)
