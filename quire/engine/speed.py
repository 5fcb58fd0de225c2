"""Tokens a second over the last seconds, from a counter that is read about once a second. Owns only the readings.

Invariant: never negative, never a division by zero, whatever the clock and the counter do.
"""

from __future__ import annotations

import collections

WINDOW_S = 10.0
STEP_S = 0.5
"""Readings closer together than this are not kept, but for the last."""


class Speed:
    """Rate of one growing counter."""

    def __init__(self, time_s: float) -> None:
        """The counter stands at 0."""
        self._readings = collections.deque([(time_s, 0)])
        self._n_tokens = 0

    def read(self, n_tokens: int, time_s: float) -> None:
        """The counter stands at `n_tokens`."""
        if n_tokens < self._n_tokens:
            self._readings.clear()  # another engine counts from 0
        self._n_tokens = n_tokens
        if not self._readings or time_s >= self._readings[-1][0] + STEP_S:
            self._readings.append((time_s, n_tokens))
            self._forget(time_s)

    def tokens_per_s(self, time_s: float) -> float:
        """The mean over the last `WINDOW_S` and up to a reading more, or since the first where that is shorter."""
        self._forget(time_s)
        if not self._readings:
            return 0.0
        first_s, before = self._readings[0]
        return (self._n_tokens - before) / (time_s - first_s) if time_s > first_s else 0.0

    def _forget(self, time_s: float) -> None:
        """All readings before the window but the last of them, which says how the counter stood when it began."""
        while len(self._readings) > 1 and self._readings[1][0] <= time_s - WINDOW_S:
            self._readings.popleft()
