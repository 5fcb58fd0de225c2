"""From what a simulation saw to figures: latencies, rates, goodput, the cache and the queue. Names as `bench serve`.

Rates are over the time from the first arrival to the last token. Latencies are of the requests that were completed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from quire.bench.simulate.record import Outcome, Run, StepLog
from quire.bench.summary import mean, percentile
from quire.planner.workload import parse_limits

PERCENTILES: Final = (50.0, 90.0, 99.0)
LIMITED: Final = ("ttft", "tpot", "e2e")


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds that a request is to keep; inf: none."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf

    def meets(self, outcome: Outcome) -> bool:
        """Whether a request was completed within all limits; one token has no TPOT and meets any."""
        if not outcome.is_done:
            return False
        tpot_s = outcome.tpot_s or 0.0
        return outcome.ttft_s <= self.ttft_s and tpot_s <= self.tpot_s and outcome.e2e_s <= self.e2e_s


def parse_slo(text: str) -> Slo | None:
    """`ttft=200ms,tpot=20ms`; None for an empty text. None for an empty text. ConfigError for another form."""
    limits = parse_limits(text, LIMITED)
    return Slo(**limits) if limits else None


def figures(run: Run, slo: Slo | None = None) -> dict[str, float | int | None]:
    """All of one run, flat, in the order in which people read them."""
    done = [one for one in run.outcomes if one.is_done]
    begin_s = min((one.arrival_s for one in run.outcomes), default=0.0)
    duration_s = max((one.end_s for one in done), default=begin_s) - begin_s
    found: dict[str, float | int | None] = {
        "requests": len(run.outcomes),
        "completed": len(done),
        "refused": sum(bool(one.refusal) for one in run.outcomes),
        "duration_s": duration_s,
        "request_throughput": _share(len(done), duration_s),
        "output_throughput": _share(sum(one.output_len for one in done), duration_s),
        "total_token_throughput": _share(sum(one.input_len + one.output_len for one in done), duration_s),
    }
    if slo is not None:
        n_good = sum(map(slo.meets, run.outcomes))
        found |= {"goodput": _share(n_good, duration_s), "slo_attainment": _share(n_good, len(run.outcomes))}
    latencies = {
        "ttft": [one.ttft_s for one in done],
        "tpot": [one.tpot_s for one in done if one.tpot_s is not None],
        "e2e": [one.e2e_s for one in done],
    }
    for name, values in latencies.items():
        found[f"mean_{name}_ms"] = _ms(mean(values))
        found |= {f"p{share:g}_{name}_ms": _ms(percentile(values, share)) for share in PERCENTILES}
    found |= {f"p{share:g}_itl_ms": _ms(value) for share, value in gap_percentiles(run.logs, (50.0, 99.0)).items()}
    found["max_itl_ms"] = _ms(max((gap for log in run.logs for gap in log.gaps_s), default=math.nan))
    return found | _of_steps(run.logs, duration_s)


def _of_steps(logs: Sequence[StepLog], duration_s: float) -> dict[str, float | int | None]:
    held_s, taken_s = sum(log.held_s for log in logs), sum(log.taken_s for log in logs)
    slots_s = sum(log.sampled_s * log.kv_slots for log in logs)
    queries = sum(log.prefix_queries for log in logs)
    return {
        "steps": sum(log.n_steps for log in logs),
        "busy_share": _share(sum(log.busy_s for log in logs), duration_s * len(logs)),
        "mean_kv_use": _share(taken_s, slots_s),
        "peak_kv_use": max((_share(log.most_taken, log.kv_slots) or 0.0 for log in logs), default=None),
        "kv_waste": None if not taken_s else 1.0 - held_s / taken_s,
        "mean_kv_cached": _share(sum(log.cached_s for log in logs), slots_s),
        "mean_waiting": _share(sum(log.waiting_s for log in logs), sum(log.busy_time_s for log in logs)),
        "peak_waiting": max((log.most_waiting for log in logs), default=0),
        "preemptions": sum(log.preemptions for log in logs),
        "prefix_hit_rate": _share(sum(log.prefix_hits for log in logs), queries),
    }


def gap_percentiles(logs: Sequence[StepLog], shares: Sequence[float]) -> dict[float, float]:
    """Of the times between two tokens of a sequence: gap number ceil(share * n) in order. NaN where there is none."""
    pairs = sorted(pair for log in logs for pair in zip(log.gaps_s, log.n_gaps, strict=True))
    total = sum(n for _, n in pairs)
    found = dict.fromkeys(shares, math.nan)
    for share in shares:
        rank, seen = share / 100 * total, 0
        for gap_s, n in pairs:
            seen += n
            if seen >= rank:
                found[share] = gap_s
                break
    return found


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else 1000 * seconds
