"""How evenly tokens go to the experts of a model: what compute has counted, read now and then.

Owns the figure and how often it is read. Does not own the counting (`compute/layers/experts`).
Invariant: who asks more often than every `PERIOD_S` gets the last figure; reading makes a device end its steps first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final, Protocol

from quire.core.balance import BalanceFacts
from quire.core.events import EngineStats

PERIOD_S: Final = 10.0
Loads = list[list[int]]
"""Of each layer with experts, how many tokens chose each of them."""


class Balancer(Protocol):
    """What moves experts, see `ExpertBalancer`."""

    @property
    def facts(self) -> BalanceFacts: ...


class ExpertLoad:
    """Since the engine's start, without what starts and wakings run themselves."""

    def __init__(self, read: Callable[[], Loads], layers: list[int], balancer: Balancer | None = None) -> None:
        """read: what compute has counted; from nothing again, where weights were given up in between. layers: of each
        row of it the number in the model, from 0. balancer: None where experts stay."""
        self._read, self._layers, self._balancer = read, layers, balancer
        self._past: Loads = []
        self._before: Loads | None = read()
        self._next_s, self._imbalance = 0.0, 0.0
        self._map: list[bytes] = []

    def counts(self) -> Loads:
        """So far."""
        if self._before is None:
            return self._past
        fresh = since(self._before, self._read())
        return _each(int.__add__, fresh, self._past) if self._past else fresh

    def rest(self) -> None:
        """Before sleep."""
        self._past, self._before = self.counts(), None

    def go_on(self) -> None:
        """Behind it."""
        self._before = self._read()

    def note(self, stats: EngineStats, now_s: float) -> None:
        """Its figures."""
        stats.expert_imbalance, stats.expert_map = self.imbalance(now_s), self._map
        stats.expert_layers = self._layers[: len(self._map)]
        if self._balancer is not None:
            stats.expert_balance = self._balancer.facts

    def imbalance(self, now_s: float) -> float:
        """See `imbalance`, at most PERIOD_S old."""
        if now_s >= self._next_s:
            counts = self.counts()
            self._next_s, self._imbalance, self._map = now_s + PERIOD_S, imbalance(counts), load_map(counts)
        return self._imbalance


def since(before: Loads, loads: Loads) -> Loads:
    """What was counted between both."""
    return _each(int.__sub__, loads, before)


def imbalance(loads: Loads) -> float:
    """Tokens of a layer's busiest expert, over those of its mean one: the mean of all layers, 1 where all are as busy;
    0 without tokens."""
    return statistics.fmean([max(one) * len(one) / sum(one) for one in loads if sum(one)] or [0.0])


def load_map(loads: Loads) -> list[bytes]:
    """See `EngineStats.expert_map`; zeros where a layer has seen no token."""
    return [bytes(min(255, 16 * n * len(one) // max(1, sum(one))) for n in one) for one in loads]


def _each(change: Callable[[int, int], int], loads: Loads, others: Loads) -> Loads:
    return [list(map(change, *layer)) for layer in zip(loads, others, strict=True)]
