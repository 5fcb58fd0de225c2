"""What a simulation saw: of each request its times, of each replica its steps. Plain numbers; owns no arithmetic."""

from __future__ import annotations

import dataclasses
import math
from array import array

from quire.bench.timeline import Timeline

MAX_TIMELINE = 200_000
"""Steps of a timeline that are kept."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """One request, in the clock's seconds; NaN: it never came to that."""

    number: int
    arrival_s: float
    input_len: int
    output_len: int
    first_s: float = math.nan
    end_s: float = math.nan
    n_cached: int = 0
    replica: int = -1
    refusal: str = ""
    """Why the engine did not take it: a code."""
    reason: str = ""
    """The same in words."""

    @property
    def is_done(self) -> bool:
        """It got all that it wanted."""
        return not math.isnan(self.end_s)

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token behind the first; None where there is none."""
        return (self.end_s - self.first_s) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def e2e_s(self) -> float:
        """From its arrival to its last token."""
        return self.end_s - self.arrival_s


@dataclasses.dataclass(slots=True)
class StepLog:
    """The steps of one replica. Sums over time weigh each sample by the seconds since the one before it."""

    gaps_s: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    """Between a step that brought tokens and the one before it."""
    n_gaps: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    """Sequences that waited so long for their next token."""
    n_steps: int = 0
    n_computed: int = 0
    """Rows of all steps: tokens computed, padding counted in."""
    busy_s: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    kv_slots: int = 0
    """Tokens that its pages can hold."""
    sampled_s: float = 0.0
    """Time that the sums below are over, while it had work."""
    held_s: float = 0.0
    """Sum of tokens in the cache that sequences hold, times seconds."""
    taken_s: float = 0.0
    """The same of the token slots that are taken, or reserved, for them."""
    cached_s: float = 0.0
    """The same of slots that only the prefix tree holds."""
    busy_time_s: float = 0.0
    """Time that the next sum is over."""
    waiting_s: float = 0.0
    """Sum of waiting requests, times the seconds of the step that they wait through."""
    most_taken: int = 0
    most_waiting: int = 0
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    kv_line: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    """(time, tokens held, slots taken), for pictures."""

    def sample(self, now_s: float, seconds: float, held: int, taken: int, cached: int) -> None:
        """The cache as it was for so many seconds."""
        self.sampled_s += seconds
        self.held_s += seconds * held
        self.taken_s += seconds * taken
        self.cached_s += seconds * cached
        self.most_taken = max(self.most_taken, taken)
        if len(self.kv_line) < MAX_TIMELINE:
            self.kv_line.append((now_s, held, taken))

    def step(
        self, time_s: float, seconds: float, n_running: int, n_waiting: int, n_tokens: int, n_prefill: int
    ) -> None:
        """One step has ended, so long after the one before it, or after the replica was idle."""
        self.n_steps += 1
        self.n_computed += n_tokens
        self.busy_time_s += seconds
        self.waiting_s += seconds * n_waiting
        self.most_waiting = max(self.most_waiting, n_waiting)
        line = self.timeline
        if len(line) < MAX_TIMELINE:
            line.time_s.append(time_s)
            line.n_running.append(n_running)
            line.n_waiting.append(n_waiting)
            line.n_tokens.append(n_tokens)
            line.n_prefill_tokens.append(n_prefill)


@dataclasses.dataclass(slots=True)
class Run:
    """One simulation."""

    outcomes: list[Outcome]
    logs: list[StepLog]
    """Of each replica."""
    cpu_s: float = 0.0
    """Processor time that it took here."""
