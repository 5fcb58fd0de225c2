"""The waiting queue: by priority, then fairly between tenants, then in order of arrival.

Tenants of one priority share by deficit round robin (Shreedhar and Varghese 1995), counted in tokens: a turn gives a
tenant `QUANTUM` of them, a sequence costs its prompt when it leaves the queue and its output when it ends. With one
tenant the order is that of arrival. A sequence that comes back (preempted, deferred) has paid: it goes before the new
ones of its priority, unless there is but one tenant, whose order of arrival holds.
Owns the order only. Invariant: an entry counts while its sequence is WAITING; those of ended ones are skipped, and
swept when they outnumber the rest.
"""

from __future__ import annotations

import bisect
import collections
import heapq

from quire.control.seq import Seq, SeqState

QUANTUM = 2048

Heap = list[tuple[tuple[int, int, int], Seq]]


def _live(heap: Heap) -> Heap:
    """The heap without ended sequences at its top."""
    while heap and heap[0][1].state is not SeqState.WAITING:
        heapq.heappop(heap)
    return heap


class _Level:
    """One priority: tenants in a ring, and those who came back."""

    def __init__(self) -> None:
        self.returned: Heap = []
        self._tenants: dict[str, Heap] = {}
        self._ring: collections.deque[str] = collections.deque()
        self._deficits: dict[str, int] = {}
        self._has_turn = False
        """The first of the ring was given its quantum."""

    def push(self, seq: Seq) -> None:
        tenant = seq.request.terms.tenant
        heap = self._tenants.get(tenant)
        if heap is None:
            heap = self._tenants[tenant] = []
            self._ring.append(tenant)
            self._deficits[tenant] = 0
        heapq.heappush(heap, (seq.key, seq))

    def heap(self) -> Heap | None:
        """The heap whose top is next, or None when the level is empty. Idempotent until something is popped."""
        returned, fair = _live(self.returned), self._fair()
        if not returned or fair is None:
            return returned or fair
        return returned if len(self._ring) > 1 or returned[0] < fair[0] else fair

    def take(self, heap: Heap) -> Seq:
        """Pop the top of `heap()`, for its price."""
        seq = heapq.heappop(heap)[1]
        if heap is not self.returned:
            self._deficits[seq.request.terms.tenant] -= seq.prompt_len if seq.index == 0 else 1
        return seq

    def charge(self, tenant: str, n_tokens: int) -> None:
        """A sequence of `tenant` has made these tokens; forgotten for one that has nothing waiting."""
        if tenant in self._deficits:
            self._deficits[tenant] -= n_tokens

    def heaps(self) -> list[Heap]:
        """Every heap, to be swept."""
        return [self.returned, *self._tenants.values()]

    def _fair(self) -> Heap | None:
        while self._ring:
            tenant = self._ring[0]
            heap = _live(self._tenants[tenant])
            if not heap:
                self._ring.popleft()
                del self._tenants[tenant], self._deficits[tenant]
                self._has_turn = False
            elif len(self._ring) == 1 or self._deficits[tenant] > 0:
                return heap
            elif self._has_turn:
                self._ring.rotate(-1)
                self._has_turn = False
            else:
                self._deficits[tenant] += QUANTUM
                self._has_turn = True
        return None


class WaitQueue:
    """Push and pop are O(log n) for one tenant, removal is O(1)."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
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
            level = self._levels[priority] = _Level()
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
        """A sequence that ran has ended: its tenant pays for the output."""
        level = self._levels.get(seq.key[0])
        if level is not None:
            level.charge(seq.request.terms.tenant, seq.n_outputs)

    def _next(self) -> tuple[_Level, Heap] | None:
        while self._priorities:
            level = self._levels[self._priorities[0]]
            heap = level.heap()
            if heap:
                return level, heap
            del self._levels[self._priorities.pop(0)]
        return None
