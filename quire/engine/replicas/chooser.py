"""Which replica takes a request: one that knows its beginning, else its user's last one, else the least loaded.

Owns what was sent where: open sequences, sessions, and with `holdings.py` what replicas hold of prefixes, which they
say themselves. Does not own who is alive: that is said by whoever asks. Safe to call from several threads.
A beginning counts if it is at least half of the prompt: all that a chat template begins with must not draw all to one.
Invariant: a replica that is silent or overloaded is passed by while another is not.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Final

import msgspec

from quire.control.cache import salt_of
from quire.control.digests import prompt_digests
from quire.core.events import PrefixUpdate
from quire.core.request import Request
from quire.core.routing import ReplicaRouting, RoutingStats
from quire.engine.replicas.holdings import Holdings

MAX_SESSIONS: Final = 65_536
SLACK: Final = 4
"""Sequences by which a replica may be ahead of the least loaded one, beyond a quarter of its slots."""

Session = tuple[str, str]
_CHOOSERS: Final[weakref.WeakValueDictionary[str, Chooser]] = weakref.WeakValueDictionary()


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that is to be placed, or was."""

    digests: list[bytes]
    session: Session | None
    n_seqs: int
    replica: str = ""
    n_expected: int | None = None
    """Pages that its replica was expected to hold; None: it is not placed, or the replica has said what it found."""


class Chooser:
    """See the module. Keep it alive: `chooser_of` does not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._page_size = 0
        self._is_apart = False
        self._n_slots: dict[str, int] = {}
        self._n_open: collections.Counter[str] = collections.Counter()
        self._holdings: dict[str, Holdings] = {}
        self._sessions: collections.OrderedDict[Session, str] = collections.OrderedDict()
        self._requests: dict[str, _Open] = {}
        self._turn: dict[str, int] = {}
        self._n_placed = 0
        self._counts = RoutingStats()
        """Its counters."""
        self._routable: frozenset[str] = frozenset()
        self.was_routable: set[str] = set()
        """Those that are or were `routable`, however shortly."""
        self.silent: frozenset[str] = frozenset()
        """Those that have said nothing for a while: passed by as long as another speaks."""

    @property
    def routable(self) -> frozenset[str]:
        """Replicas that take requests, as they were told last."""
        return self._routable

    @routable.setter
    def routable(self, replicas: frozenset[str]) -> None:
        self._routable = replicas
        self.was_routable |= replicas

    def introduce(
        self, replica: str, n_slots: int, n_pages: int, page_size: int, *, deterministic_apart: bool = False
    ) -> None:
        """A replica is loaded, perhaps anew: it holds nothing yet. deterministic_apart: see `EngineReady`."""
        with self._lock:
            self._page_size, self._is_apart = page_size, deterministic_apart
            self._n_slots[replica] = n_slots
            self._holdings[replica] = Holdings(n_pages)

    def dismiss(self, replica: str) -> None:
        """It is gone, or without an engine: until it is introduced again it comes last."""
        with self._lock:
            self._n_slots.pop(replica, None)
            self._holdings.pop(replica, None)
            self._n_open.pop(replica, None)
            self._turn.pop(replica, None)

    def hear(self, replica: str, update: PrefixUpdate) -> bool:
        """What a replica says of what it holds; False: it is not here, or something before it was lost."""
        with self._lock:
            holdings = self._holdings.get(replica)
            if holdings is None:
                return False
            was_known = holdings.is_known
            holdings.hear(update, (one.digests for one in self._requests.values() if one.replica == replica))
            self._counts.pictures += update.number == 0
            self._counts.gaps += was_known and not holdings.is_known
            return holdings.is_known

    def unknown(self) -> list[str]:
        """Replicas that are to be asked for all that they hold: they have not begun to tell, or something was lost."""
        with self._lock:
            return [replica for replica, holdings in self._holdings.items() if not holdings.is_known]

    def expect(self, wire_id: str, request: Request) -> None:
        """A request is to be placed."""
        salt = salt_of(request, apart=self._is_apart and request.params.deterministic)
        is_known = self._page_size and (request.content_id or not request.adapter)
        digests = prompt_digests(request.prompt_token_ids, self._page_size, salt) if is_known else []
        session = (request.terms.tenant, request.terms.user) if request.terms.user else None
        with self._lock:
            self._requests[wire_id] = _Open(digests, session, request.params.n)

    def rank(self, wire_id: str, replicas: Sequence[str]) -> list[str]:
        """These replicas, the one that should take the request first."""
        with self._lock:
            opened = self._requests.get(wire_id)
            digests, session = (opened.digests, opened.session) if opened is not None else ([], None)
            last = self._sessions.get(session, "") if session is not None else ""
            least = min((self._n_open[replica] for replica in replicas if replica in self._n_slots), default=0)

            def order(replica: str) -> tuple[bool, bool, bool, int, bool, int, int]:
                n_open = self._n_open[replica]
                n_known = self._n_known(replica, digests)
                n_saved = n_known if 2 * n_known >= len(digests) else 0
                return (
                    replica not in self._n_slots, replica in self.silent, self._is_overloaded(replica, least),
                    -n_saved, replica != last, n_open, self._turn.get(replica, 0),
                )  # fmt: skip

            return sorted(replicas, key=order)

    def placed(self, wire_id: str, replica: str) -> None:
        """A replica has taken the request."""
        with self._lock:
            opened = self._requests.get(wire_id)
            if opened is None or opened.replica == replica:
                return
            self._take_off(opened)
            opened.replica = replica
            self._n_open[replica] += opened.n_seqs
            self._n_placed += 1
            self._turn[replica] = self._n_placed
            opened.n_expected = self._n_known(replica, opened.digests)
            if replica in self._holdings:
                self._holdings[replica].expect(opened.digests)
            if opened.session is not None:
                self._sessions[opened.session] = replica
                self._sessions.move_to_end(opened.session)
                if len(self._sessions) > MAX_SESSIONS:
                    self._sessions.popitem(last=False)

    def replica_of(self, wire_id: str) -> str:
        """Who has the request; empty before it is placed."""
        with self._lock:
            opened = self._requests.get(wire_id)
            return opened.replica if opened is not None else ""

    def found(self, wire_id: str, n_tokens: int) -> None:
        """Its replica found so many tokens of its prompt in its prefix tree."""
        with self._lock:
            opened = self._requests.get(wire_id)
            if opened is None or opened.n_expected is None:
                return
            n_expected, opened.n_expected = opened.n_expected * self._page_size, None
            self._counts.expected_tokens += n_expected
            self._counts.found_tokens += n_tokens
            self._counts.missed_tokens += max(0, n_expected - n_tokens)

    def done(self, wire_id: str) -> None:
        """It has ended, however."""
        with self._lock:
            opened = self._requests.pop(wire_id, None)
            if opened is not None:
                self._take_off(opened)

    def n_open(self, replica: str) -> int:
        """Sequences that were sent there and have not ended."""
        with self._lock:
            return self._n_open[replica]

    def stats(self) -> RoutingStats:
        """What is known of each replica, and how right it was."""
        with self._lock:
            replicas = [
                ReplicaRouting(name, self._n_open[name], one.n_held, one.n_sent, one.is_known)
                for name, one in self._holdings.items()
            ]
            return msgspec.structs.replace(self._counts, replicas=replicas)

    def _n_known(self, replica: str, digests: Sequence[bytes]) -> int:
        holdings = self._holdings.get(replica)
        return holdings.n_known(digests) if holdings is not None else 0

    def _take_off(self, opened: _Open) -> None:
        if opened.replica:
            if opened.replica in self._holdings:
                self._holdings[opened.replica].end(opened.digests)
            left = self._n_open[opened.replica] - opened.n_seqs
            if left > 0:
                self._n_open[opened.replica] = left
            else:
                self._n_open.pop(opened.replica, None)

    def _is_overloaded(self, replica: str, least: int) -> bool:
        """It has no slot left, or is far ahead of the least loaded one, which thus is not overloaded itself unless all
        are full."""
        n_open, n_slots = self._n_open[replica], self._n_slots.get(replica, 0)
        return bool(n_slots and n_open >= n_slots) or n_open - least > SLACK + n_slots // 4


def chooser_of(application: str) -> Chooser:
    """The chooser of an application in this process: its server and the router that Ray Serve makes share one."""
    return _CHOOSERS.setdefault(application, Chooser())
