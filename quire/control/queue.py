"""The waiting queue: sequences by key (priority, arrival, index); a preempted one comes back before later arrivals.

Owns the order only. Invariant: an entry counts while its sequence is WAITING; those of ended ones are skipped, and
swept when they outnumber the rest.
"""

from __future__ import annotations

import heapq

from quire.control.seq import Seq, SeqState


class WaitQueue:
    """A heap with lazy removal: push and pop O(log n), removal O(1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Seq]] = []
        self._n_live = 0

    def __len__(self) -> int:
        return self._n_live

    def push(self, seq: Seq) -> None:
        """Enter a WAITING sequence that is not in the queue."""
        heapq.heappush(self._heap, (seq.key, seq))
        self._n_live += 1

    def peek(self) -> Seq | None:
        """The first in order, or None."""
        while self._heap and self._heap[0][1].state is not SeqState.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Seq:
        """Remove and return the first (IndexError when empty)."""
        if self.peek() is None:
            raise IndexError("the waiting queue is empty")
        self._n_live -= 1
        return heapq.heappop(self._heap)[1]

    def forget(self) -> None:
        """A sequence in the queue has just ended: its entry no longer counts."""
        self._n_live -= 1
        if len(self._heap) > 2 * self._n_live + 64:
            self._heap = [entry for entry in self._heap if entry[1].state is SeqState.WAITING]
            heapq.heapify(self._heap)
