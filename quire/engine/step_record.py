"""What one step did and when, for plots, benchmarks and logs. Owns the records, not who makes or reads them."""

from __future__ import annotations

import dataclasses

from quire.control.live_seqs import LiveSeqs
from quire.core.plan import Spans, StepPlan
from quire.core.result import StepResult


@dataclasses.dataclass(slots=True)
class HostTimes:
    """When the loop came to each phase of one step, in seconds of the engine's clock; a phase lasts until the next.

    Steps overlap: a step is scheduled and submitted before the one before it is waited for and committed.
    """

    schedule_s: float
    submit_s: float = 0.0
    submitted_s: float = 0.0
    wait_s: float = 0.0
    commit_s: float = 0.0
    committed_s: float = 0.0


@dataclasses.dataclass(slots=True)
class StepRecord:
    """What one committed step did, for plots, benchmarks and logs."""

    step: int
    time_s: float
    n_spans: int
    n_tokens: int
    n_prefill_tokens: int
    n_running: int
    """Sequences with a slot once the step was committed."""
    n_waiting: int
    host_s: float
    total_s: float
    times: HostTimes
    spans: Spans
    """As planned, to be read only."""
    shared_prefixes: list[tuple[list[int], int]]
    """As in `StepPlan`."""


def record_of(live: LiveSeqs, plan: StepPlan, result: StepResult, times: HostTimes) -> StepRecord:
    """Of a committed step."""
    spans, n_spans = plan.spans, len(plan.spans)
    if plan.n_tokens == n_spans:  # most steps
        n_decode = spans.wants.count(True)
    else:
        n_decode = sum([wants for length, wants in zip(spans.lengths, spans.wants, strict=True) if length == 1])
    return StepRecord(
        step=plan.step,
        time_s=times.committed_s,
        n_spans=n_spans,
        n_tokens=plan.n_tokens,
        n_prefill_tokens=plan.n_tokens - n_decode,
        n_running=len(live.running),
        n_waiting=len(live.waiting),
        host_s=result.timings.host_s,
        total_s=result.timings.total_s,
        times=times,
        spans=spans,
        shared_prefixes=plan.shared_prefixes,
    )
