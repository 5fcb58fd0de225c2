"""Time as a value that can be replaced. Owns the monotonic and the virtual clock; no wall time in decisions."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds from an arbitrary origin."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """`time.monotonic`: unaffected by changes of the wall clock."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to; the null device advances it by its cost model."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (ValueError if negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds} s")
        self._now_s += seconds
