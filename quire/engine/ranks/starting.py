"""Which ranks keep a start waiting: said while it goes on, for nobody can tell a slow one from one that hangs.

Owns the words, and how often they come. Does not own the wait (`group.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from quire.engine.ranks.member import LocalRank
from quire.engine.ranks.remote import RemoteRank
from quire.engine.ranks.ring import READY

logger = logging.getLogger("quire.engine")

SAY_S: Final = 20.0
"""So often; most starts are over by then. A rank that loads gives signs of life more often."""
Member = LocalRank | RemoteRank


def names_of(ranks: Sequence[Member]) -> str:
    """Of ranks, with what the kernel says of each."""
    states = [(rank.name, rank.state_words()) for rank in ranks]
    names = ", ".join(f"{name}, {state}" if state else name for name, state in states)
    return f"{names}," if states and states[-1][1] else names


class StartWatch:
    """Looks at ranks time and again; says nothing of those that have loaded."""

    def __init__(self, began_s: float) -> None:
        """began_s: when they were started, of time.monotonic()."""
        self._began_s, self._say_s = began_s, began_s + SAY_S

    def look(self, ranks: Sequence[Member], now_s: float) -> None:
        """Once in `SAY_S`: who has not begun to load, and who gives no sign of life while it loads."""
        if now_s < self._say_s:
            return
        self._say_s = now_s + SAY_S
        standings = [(rank, rank.standing()) for rank in ranks]
        absent = [rank for rank, one in standings if one.state < READY]
        if absent:
            logger.warning("waiting for %s to start, for %.0f s now", names_of(absent), now_s - self._began_s)
        silent = [rank for rank, one in standings if one.state == READY and one.silent_s > SAY_S]
        if silent:
            logger.warning("%s gave no sign of life for %g s while the model is loaded", names_of(silent), SAY_S)
