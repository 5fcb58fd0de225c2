"""Which replica takes a request: one that knows its beginning, else its user's last one, else the least loaded.

Owns what was sent where: marks of prefixes (`prefixes.py`), open sequences, sessions. Does not own who is alive: that
is said by whoever asks. Safe to call from several threads.
A beginning counts if it is at least half of the prompt: all that a chat template begins with must not draw all to one.
Invariants: a replica that is overloaded is passed by while another is not; a replica is remembered for no more marks
than it has pages. It may have evicted some of them: then the prefix is computed there again, and the memory is right.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Final

from quire.core.request import Request
from quire.engine.replicas.prefixes import page_marks

MAX_SESSIONS: Final = 65_536
SLACK: Final = 4
"""Sequences by which a replica may be ahead of the least loaded one, beyond a quarter of its slots."""

Session = tuple[str, str]
_CHOOSERS: Final[weakref.WeakValueDictionary[str, Chooser]] = weakref.WeakValueDictionary()


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that is to be placed, or was."""

    marks: list[bytes]
    session: Session | None
    n_seqs: int
    replica: str = ""


class _Memory:
    """What one replica should have in its prefix tree: the marks used last."""

    def __init__(self) -> None:
        self.n_most = 0
        self._marks: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def n_known(self, marks: Sequence[bytes]) -> int:
        """How many of these pages, from the first on."""
        for number, mark in enumerate(marks):
            if mark not in self._marks:
                return number
        return len(marks)

    def learn(self, marks: Iterable[bytes]) -> None:
        for mark in marks:
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > self.n_most:
            self._marks.popitem(last=False)


class Chooser:
    """See the module. Keep it alive: `chooser_of` does not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._page_size = 0
        self._n_slots: dict[str, int] = {}
        self._n_open: collections.Counter[str] = collections.Counter()
        self._memories: collections.defaultdict[str, _Memory] = collections.defaultdict(_Memory)
        self._sessions: collections.OrderedDict[Session, str] = collections.OrderedDict()
        self._requests: dict[str, _Open] = {}
        self._turn: dict[str, int] = {}
        self._n_placed = 0
        self.routable: frozenset[str] = frozenset()
        """Replicas that take requests, as they were told last."""

    def introduce(self, replica: str, n_slots: int, n_pages: int, page_size: int) -> None:
        """A replica is loaded, perhaps anew: it knows nothing yet."""
        with self._lock:
            self._page_size = page_size
            self._n_slots[replica] = n_slots
            self._memories[replica] = _Memory()
            self._memories[replica].n_most = n_pages

    def dismiss(self, replica: str) -> None:
        """It is gone, or without an engine: until it is introduced again it comes last."""
        with self._lock:
            self._n_slots.pop(replica, None)
            self._memories.pop(replica, None)
            self._n_open.pop(replica, None)
            self._turn.pop(replica, None)

    def expect(self, wire_id: str, request: Request) -> None:
        """A request is to be placed."""
        adapter = request.content_id or request.adapter  # as engines tell pages apart: a name may be given anew
        salt = request.cache_salt + (f"\1{adapter}" if adapter else "")
        marks = page_marks(request.prompt_token_ids, self._page_size, salt) if self._page_size else []
        session = (request.terms.tenant, request.terms.user) if request.terms.user else None
        with self._lock:
            self._requests[wire_id] = _Open(marks, session, request.params.n)

    def rank(self, wire_id: str, replicas: Sequence[str]) -> list[str]:
        """These replicas, the one that should take the request first."""
        with self._lock:
            opened = self._requests.get(wire_id)
            marks, session = (opened.marks, opened.session) if opened is not None else ([], None)
            last = self._sessions.get(session, "") if session is not None else ""
            least = min((self._n_open[replica] for replica in replicas if replica in self._n_slots), default=0)

            def order(replica: str) -> tuple[bool, bool, int, bool, int, int]:
                n_open = self._n_open[replica]
                n_known = self._memories[replica].n_known(marks) if replica in self._memories else 0
                n_saved = n_known if 2 * n_known >= len(marks) else 0
                return (
                    replica not in self._n_slots, self._is_overloaded(replica, least), -n_saved, replica != last,
                    n_open, self._turn.get(replica, 0),
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
            if replica in self._memories:
                self._memories[replica].learn(opened.marks)
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

    def _take_off(self, opened: _Open) -> None:
        if opened.replica:
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
