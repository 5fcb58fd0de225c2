"""Limits on a request's time: how long it may wait for its first slot, and how long it may take in all.

Owns when a sequence is due, by the scheduler's own clock. Does not own ending it (`Scheduler.expire`).
Invariant: entries of ended sequences are skipped, and swept when they outnumber the rest.
"""

from __future__ import annotations

import heapq

from quire.control.seq import Seq, SeqState
from quire.core.failure import Code


class Deadlines:
    """A heap of due times."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Code, Seq]] = []
        self._serial = 0
        self._swept_len = 0

    def __bool__(self) -> bool:
        """Whether there may be one that is due at some time."""
        return bool(self._heap)

    def add(self, seq: Seq, now_s: float) -> None:
        """Note the limits of a sequence that has just arrived."""
        terms = seq.request.terms
        for limit_s, code in ((terms.queue_limit_s, Code.QUEUE_TIMEOUT), (terms.time_limit_s, Code.REQUEST_TIMEOUT)):
            if limit_s > 0:
                self._serial += 1  # before the sequence, which cannot be compared
                heapq.heappush(self._heap, (now_s + limit_s, self._serial, code, seq))
        if len(self._heap) > 2 * self._swept_len + 256:
            self._heap = [entry for entry in self._heap if _counts(entry[3], entry[2])]
            heapq.heapify(self._heap)
            self._swept_len = len(self._heap)

    def due(self, now_s: float) -> list[tuple[Seq, Code]]:
        """Sequences whose limit has passed, with the code of the limit, each once."""
        found: list[tuple[Seq, Code]] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, code, seq = heapq.heappop(self._heap)
            if _counts(seq, code) and all(seq is not other for other, _ in found):
                found.append((seq, code))
        return found


def _counts(seq: Seq, code: Code) -> bool:
    if code is Code.QUEUE_TIMEOUT:
        return seq.state is SeqState.WAITING and seq.n_admissions == 0
    return seq.state is not SeqState.ENDED
