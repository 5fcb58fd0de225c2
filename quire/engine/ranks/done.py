"""How many steps the device of a rank has done: told from beside, while the rank computes or hangs.

Owns the count. Does not own who asks (`process.py`, `group.py`). Invariant: nobody waits: a step is a mark behind its
work, also behind a replayed graph, and whoever asks looks which marks were passed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable


class DoneSteps:
    """Of one rank. One thread launches, and one other asks."""

    def __init__(self, mark: Callable[[], Callable[[], bool]]) -> None:
        """mark: of the device, see `Device.mark`."""
        self._mark = mark
        self._marks: collections.deque[Callable[[], bool]] = collections.deque()
        self._n = 0

    def launched(self) -> None:
        """A step is queued, to its end."""
        self._marks.append(self._mark())

    def count(self) -> int:
        """Steps that are done."""
        while self._marks and self._marks[0]():
            self._marks.popleft()
            self._n += 1
        return self._n
