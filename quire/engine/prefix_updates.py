"""Clients that follow what the prefix trees of an engine hold, as replicas do for whoever chooses among them.

Owns who follows. Does not own what is told (`control/tree_digests.py`) nor when: with the figures.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.control.scheduler import Scheduler
from quire.control.tree_digests import TreeDigests
from quire.core.events import PrefixUpdate


class PrefixPublisher:
    """See the module. tell: an update to the client with a ticket; False if it is gone."""

    def __init__(self, scheduler: Scheduler, tell: Callable[[int, PrefixUpdate], bool]) -> None:
        self._scheduler, self._tell = scheduler, tell
        self._digests = TreeDigests()

    def follow(self, ticket: int) -> None:
        """The client that has asked with this ticket is told from now on."""
        self._digests.follow(ticket, self._scheduler.live.caches)

    def send(self) -> None:
        """An update to each; also an empty one, which says that nothing is missing."""
        for ticket, update in self._digests.updates(self._scheduler.live.caches):
            if not self._tell(ticket, update):
                self._digests.unfollow(ticket)
