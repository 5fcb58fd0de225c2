"""Replicas are asked what their prefix trees hold, and say it from then on: who is to be asked, and when again.

Owns the times of questions and answers. Does not own what they say (`holdings.py`), nor the way to them.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from quire.core.commands import Command, FollowPrefixes
from quire.core.events import PrefixUpdate
from quire.engine.replicas.chooser import Chooser

ANSWER_S: Final = 2.0
"""A question that was not answered for so long is asked again: an engine answers between two steps."""
UNTOLD_S: Final = 5.0
"""A replica says with its figures what has changed in its trees; one that does not for so long is asked again."""


class PrefixFollowing:
    """See the module. send: to one replica, by its name."""

    def __init__(self, chooser: Chooser, send: Callable[[str, Command], Awaitable[None]]) -> None:
        self._chooser, self._send = chooser, send
        self._ticket = secrets.randbits(62)
        self._asked_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}
        """When each has said something that followed what it had said before."""

    async def look(self, replicas: Collection[str], now_s: float) -> None:
        """Ask those of which it is not known what they hold; to be called now and then, since a question can be lost.
        replicas: all that are there."""
        for times in (self._asked_s, self._told_s):
            for gone in times.keys() - set(replicas):
                del times[gone]
        unknown = self._chooser.unknown()
        for name in replicas:
            asked_s, told_s = self._asked_s.get(name, 0.0), self._told_s.get(name, 0.0)
            if now_s - asked_s > ANSWER_S and (name in unknown or now_s - told_s > UNTOLD_S):
                self._asked_s[name] = now_s
                await self._send(name, FollowPrefixes(self._ticket))

    def take(self, replica: str, update: PrefixUpdate, now_s: float) -> None:
        """What one says."""
        if self._chooser.hear(replica, update):
            self._told_s[replica] = now_s
