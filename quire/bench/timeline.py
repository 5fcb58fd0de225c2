"""How a batch fills over time: sequences that run and wait, and tokens, as columns against seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol


class StepLike(Protocol):
    """What a timeline takes from the engine's record of one step."""

    time_s: float
    n_running: int
    n_waiting: int
    n_tokens: int
    n_prefill_tokens: int


class Interval(Protocol):
    """What a timeline takes from one request of the load generator."""

    start_s: float
    chunk_times_s: list[float]


@dataclasses.dataclass(slots=True)
class Timeline:
    """Columns of equal length; `time_s` counts from the first entry's origin."""

    unit: str = "tokens in the step"
    """What `n_tokens` counts: of a step, or a second."""
    time_s: list[float] = dataclasses.field(default_factory=list)
    n_running: list[int] = dataclasses.field(default_factory=list)
    n_waiting: list[int] = dataclasses.field(default_factory=list)
    n_tokens: list[float] = dataclasses.field(default_factory=list)
    n_prefill_tokens: list[float] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.time_s)

    @classmethod
    def of_steps(cls, records: Sequence[StepLike]) -> Timeline:
        """A row a step. Times stay on the engine's clock."""
        return cls(
            time_s=[record.time_s for record in records],
            n_running=[record.n_running for record in records],
            n_waiting=[record.n_waiting for record in records],
            n_tokens=[record.n_tokens for record in records],
            n_prefill_tokens=[record.n_prefill_tokens for record in records],
        )

    def from_zero(self) -> Timeline:
        """The same with times counted from the first entry."""
        origin = self.time_s[0] if self.time_s else 0.0
        return dataclasses.replace(self, time_s=[time_s - origin for time_s in self.time_s])

    def thinned(self, n: int) -> Timeline:
        """At most about `n` rows: of each stretch of rows the one with the most tokens, so that peaks stay."""
        stretch = -(-len(self) // n) or 1
        if stretch == 1:
            return self
        kept = [
            max(range(first, min(first + stretch, len(self))), key=self.n_tokens.__getitem__)
            for first in range(0, len(self), stretch)
        ]
        columns = {name: [column[i] for i in kept] for name, column in self.columns().items()}
        return Timeline(self.unit, **columns)

    def columns(self) -> dict[str, list[Any]]:
        """Name → values, for reports."""
        names = ("time_s", "n_running", "n_waiting", "n_tokens", "n_prefill_tokens")
        return {name: getattr(self, name) for name in names}


def from_requests(requests: Sequence[Interval], n_bins: int = 200) -> Timeline:
    """The client's view: a request waits until its first chunk and runs until its last; chunks a second in each bin."""
    timeline = Timeline(unit="chunks received per second")
    answered = [request for request in requests if request.chunk_times_s]
    if not answered:
        return timeline
    begin = min(request.start_s for request in answered)
    end = max(request.chunk_times_s[-1] for request in answered)
    width_s = max((end - begin) / n_bins, 1e-9)
    chunks = [0] * n_bins
    for request in answered:
        for time_s in request.chunk_times_s:
            chunks[min(int((time_s - begin) / width_s), n_bins - 1)] += 1
    for i, n_chunks in enumerate(chunks):
        middle = begin + (i + 0.5) * width_s
        timeline.time_s.append(middle - begin)
        timeline.n_waiting.append(sum(r.start_s <= middle < r.chunk_times_s[0] for r in answered))
        timeline.n_running.append(sum(r.chunk_times_s[0] <= middle <= r.chunk_times_s[-1] for r in answered))
        timeline.n_tokens.append(n_chunks / width_s)
        timeline.n_prefill_tokens.append(0)
    return timeline
