"""Tokens a second over the last seconds, from a counter that is read now and then. Owns nothing but the readings.

Invariant: never negative, never a division by zero, whatever the clock and the counter do.
"""

from __future__ import annotations

import collections

WINDOW_S = 10.0
STEP_S = 0.5
"""Readings closer together than this are not kept."""


class Speed:
    """Rate of one growing counter."""

    def __init__(self) -> None:
        self._readings: collections.deque[tuple[float, int]] = collections.deque()

    def tokens_per_s(self, n_tokens: int, time_s: float) -> float:
        """The rate from the oldest reading within `WINDOW_S` (or the one before it) to this one; 0 at the first."""
        readings = self._readings
        if readings and n_tokens < readings[-1][1]:
            readings.clear()  # another engine counts from 0
        while len(readings) > 1 and readings[1][0] <= time_s - WINDOW_S:
            readings.popleft()
        rate = 0.0
        if readings and time_s > readings[0][0]:
            rate = (n_tokens - readings[0][1]) / (time_s - readings[0][0])
        if not readings or time_s >= readings[-1][0] + STEP_S:
            readings.append((time_s, n_tokens))
        return rate
