"""How evenly tokens go to the experts of a model: what compute has counted, read now and then.

Owns the figure and how often it is read. Does not own the counting (`compute/layers/experts`).
Invariant: who asks more often than every `PERIOD_S` gets the last figure; reading makes a device end its steps first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

PERIOD_S: Final = 10.0
Loads = list[list[int]]
"""Of each layer with experts, how many tokens chose each of them."""


class ExpertLoad:
    """Since the engine's start."""

    def __init__(self, read: Callable[[], Loads]) -> None:
        self.read = read
        self._before = read()  # what the start itself ran
        self._next_s, self._imbalance = 0.0, 0.0

    def imbalance(self, now_s: float) -> float:
        """See `imbalance`, at most PERIOD_S old."""
        if now_s >= self._next_s:
            self._next_s, self._imbalance = now_s + PERIOD_S, imbalance(self.read(), self._before)
        return self._imbalance


def imbalance(loads: Loads, before: Loads | None = None) -> float:
    """Tokens of a layer's busiest expert, over those of its mean one: the mean of all layers, 1 where all are as busy;
    0 without tokens. before: loads that do not count."""
    layers: Sequence[Sequence[int]] = loads
    if before:
        both = zip(loads, before, strict=True)
        layers = [[now - then for now, then in zip(*layer, strict=True)] for layer in both]
    return statistics.fmean([max(one) * len(one) / sum(one) for one in layers if sum(one)] or [0.0])
