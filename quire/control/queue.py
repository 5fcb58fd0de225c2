"""The waiting queue: by priority, then fairly between tenants and the users of each, then in order of arrival.

Tenants of one priority share by deficit round robin (Shreedhar and Varghese 1995), counted in tokens: a turn gives a
tenant `QUANTUM` of them, a sequence costs its prompt when it leaves the queue and its output when it ends. The users
of a tenant share its turns in the same way. With one user of one tenant the order is that of arrival. A sequence that
comes back (preempted, deferred) has paid: it goes before the new ones of its priority, unless one user is alone.
Owns the order only. Invariants: an entry counts while its sequence is WAITING; those of ended ones are skipped, and
swept when they outnumber the rest; a tenant or user of whom nothing waits is forgotten when its turn comes.
"""

from __future__ import annotations

import bisect
import collections
import heapq

from quire.control.seq import Seq, SeqState

QUANTUM = 512
"""About one request: less makes the rings turn more often for each pop, more lets short requests of one go in a row."""

Heap = list[tuple[tuple[int, int, int], Seq]]


def _live(heap: Heap) -> Heap:
    """The heap without ended sequences at its top."""
    while heap and heap[0][1].state is not SeqState.WAITING:
        heapq.heappop(heap)
    return heap


class _UserQueue:
    """Sequences of one user, in order of arrival."""

    def __init__(self) -> None:
        self.heap: Heap = []

    @property
    def is_shared(self) -> bool:
        """More than one user waits here."""
        return False

    def next(self) -> Heap | None:
        """The heap, unless nothing of it waits any more."""
        return _live(self.heap) or None

    def push(self, _path: tuple[str, ...], seq: Seq) -> None:
        heapq.heappush(self.heap, (seq.key, seq))

    def charge(self, _path: tuple[str, ...], _n_tokens: int) -> None:
        """Nobody shares this."""

    def heaps(self) -> list[Heap]:
        return [self.heap]


class _RoundRobin:
    """Those who share by turns: tenants, and inside each its users. A path names one on each level."""

    def __init__(self) -> None:
        self._members: dict[str, _RoundRobin | _UserQueue] = {}
        self._ring: collections.deque[str] = collections.deque()
        self._deficits: dict[str, int] = {}
        self._has_turn = False
        """The first of the ring was given its quantum."""

    @property
    def is_shared(self) -> bool:
        """More than one user waits here."""
        return len(self._ring) > 1 or any(member.is_shared for member in self._members.values())

    def next(self) -> Heap | None:
        """The heap whose top is next, or None when nothing waits. Idempotent until something is popped."""
        while self._ring:
            name = self._ring[0]
            heap = self._members[name].next()
            if heap is None:
                self._ring.popleft()
                del self._members[name], self._deficits[name]
                self._has_turn = False
            elif len(self._ring) == 1:
                # What is used while nobody else waits is no debt: who comes later begins level.
                self._deficits[name] = max(self._deficits[name], 0)
                return heap
            elif self._deficits[name] > 0:
                return heap
            elif self._has_turn:
                self._ring.rotate(-1)
                self._has_turn = False
            else:
                self._deficits[name] += QUANTUM
                self._has_turn = True
        return None

    def push(self, path: tuple[str, ...], seq: Seq) -> None:
        """Behind the others of its user."""
        name, inner = path[0], path[1:]
        member = self._members.get(name)
        if member is None:
            member = self._members[name] = _RoundRobin() if inner else _UserQueue()
            self._ring.append(name)
            self._deficits[name] = 0
        member.push(inner, seq)

    def charge(self, path: tuple[str, ...], n_tokens: int) -> None:
        """Those of the path have used these tokens; forgotten for one of whom nothing waits."""
        name = path[0]
        if name in self._members:
            self._deficits[name] -= n_tokens
            self._members[name].charge(path[1:], n_tokens)

    def heaps(self) -> list[Heap]:
        return [heap for member in self._members.values() for heap in member.heaps()]


def _path(seq: Seq) -> tuple[str, str]:
    return seq.request.terms.tenant, seq.request.terms.user


class _PriorityLevel:
    """One priority: tenants in a ring, and those who came back."""

    def __init__(self) -> None:
        self.returned: Heap = []
        self._ring = _RoundRobin()

    def push(self, seq: Seq) -> None:
        self._ring.push(_path(seq), seq)

    def heap(self) -> Heap | None:
        """The heap whose top is next, or None when the level is empty. Idempotent until something is popped."""
        returned, fair = _live(self.returned), self._ring.next()
        if not returned or fair is None:
            return returned or fair
        return returned if self._ring.is_shared or returned[0] < fair[0] else fair

    def take(self, heap: Heap) -> Seq:
        """Pop the top of `heap()`, for its price."""
        seq = heapq.heappop(heap)[1]
        if heap is not self.returned:
            self.charge(seq, seq.prompt_len if seq.index == 0 else 1)
        return seq

    def charge(self, seq: Seq, n_tokens: int) -> None:
        """The user of `seq` and its tenant pay."""
        self._ring.charge(_path(seq), n_tokens)

    def heaps(self) -> list[Heap]:
        """Every heap, to be swept."""
        return [self.returned, *self._ring.heaps()]


class WaitQueue:
    """Push and pop are O(log n) for one user, removal is O(1)."""

    def __init__(self) -> None:
        self._levels: dict[int, _PriorityLevel] = {}
        self._priorities: list[int] = []
        self._n_live = 0
        self._n_entries = 0
        """At least as many as there are, ended ones included."""

    def __len__(self) -> int:
        return self._n_live

    def push(self, seq: Seq, *, returned: bool = False) -> None:
        """Enter a WAITING sequence that is not in the queue; `returned`: it was in the queue before."""
        priority = seq.key[0]
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _PriorityLevel()
            bisect.insort(self._priorities, priority)
        if returned:
            heapq.heappush(level.returned, (seq.key, seq))
        else:
            level.push(seq)
        self._n_live += 1
        self._n_entries += 1

    def peek(self) -> Seq | None:
        """The first in order, or None."""
        found = self._next()
        return None if found is None else found[1][0][1]

    def pop(self) -> Seq:
        """Remove and return the first (IndexError when empty)."""
        found = self._next()
        if found is None:
            raise IndexError("the waiting queue is empty")
        self._n_live -= 1
        self._n_entries -= 1
        return found[0].take(found[1])

    def forget(self) -> None:
        """A sequence in the queue has just ended: its entry no longer counts."""
        self._n_live -= 1
        if self._n_entries > 2 * self._n_live + 64:
            for level in self._levels.values():
                for heap in level.heaps():
                    heap[:] = [entry for entry in heap if entry[1].state is SeqState.WAITING]
                    heapq.heapify(heap)
            self._n_entries = self._n_live

    def charge(self, seq: Seq) -> None:
        """A sequence that ran has ended: its output is to be paid for."""
        level = self._levels.get(seq.key[0])
        if level is not None:
            level.charge(seq, seq.n_outputs * (1 if seq.search is None else seq.search.width))

    def _next(self) -> tuple[_PriorityLevel, Heap] | None:
        while self._priorities:
            level = self._levels[self._priorities[0]]
            heap = level.heap()
            if heap:
                return level, heap
            del self._levels[self._priorities.pop(0)]
        return None
