"""What `quire simulate` does: one run, a curve over rates, the capacity at an SLO, variants and baselines side by side.

Owns which simulations are made. Does not own their pictures (`charts.py`) nor tables (`tables.py`).
Invariant: variants get the same requests, at the same times where they have no seed or burstiness of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from quire.bench.simulate.baselines import DynamicBatching, PagedWhole, Reserved, StaticBatching
from quire.bench.simulate.figures import Slo, figures
from quire.bench.simulate.fleet import Fleet
from quire.bench.simulate.options import SimulateOptions
from quire.bench.simulate.record import Run
from quire.bench.simulate.replica import EngineReplica, Replica
from quire.bench.simulate.requests import SimRequest, rate_of, repeated
from quire.bench.simulate.router import router_named
from quire.config.command_line import dashed
from quire.core.errors import ConfigError
from quire.engine.simulated import SimulatedMachine

Figures = dict[str, "float | int | None"]
PRECISION: Final = 0.02
"""Of a capacity."""
MOST: Final = 4.0
LEAST_RATE: Final = 1e-3
"""Times the throughput of all at once: beyond it, or below, no capacity is looked for."""
SHARES: Final = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Rates of baselines where none is given, as shares of what the engine does of all at once."""
PICTURED: Final = 3
"""Of these, the one whose batches and gaps are drawn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve the requests."""

    name: str
    options: SimulateOptions
    machine: SimulatedMachine
    make: Callable[[SimulatedMachine], Replica] = EngineReplica

    def run(self, requests: Sequence[SimRequest]) -> Run:
        """All requests at their times."""
        options, machine = self.options, self.machine
        n_ranks = machine.config.data_parallel_size
        router = router_named(
            options.router, options.replicas, machine.page_tokens, n_ranks * machine.n_pages,
            n_ranks * machine.limits.max_num_seqs,
        )  # fmt: skip
        return Fleet([self.make(machine) for _ in range(options.replicas)], router).run(requests)

    def at(self, requests: list[SimRequest], rate: float | None) -> Run:
        """At a rate; None: at their own times."""
        return self.run(self.options.timed(requests, rate, self.machine.config.seed))


@dataclasses.dataclass(slots=True)
class Point:
    """One variant at one rate."""

    variant: str
    rate: float | None
    run: Run
    figures: Figures

    @property
    def refusals(self) -> dict[str, list[str]]:
        """Code → the reasons of all requests that were refused so."""
        found: dict[str, list[str]] = {}
        for one in self.run.outcomes:
            if one.refusal:
                found.setdefault(one.refusal, []).append(one.reason)
        return found


def check_lengths(variants: Sequence[Variant], requests: Sequence[SimRequest]) -> None:
    """ConfigError where no variant has room for any of them, so that there is nothing to simulate."""
    most = max(variant.machine.limits.max_model_len for variant in variants)
    least = min(requests, key=lambda one: one.input_len + one.output_len, default=None)
    if least is not None and least.input_len + least.output_len > most:
        raise ConfigError(
            f"each request is longer than a sequence can be: the shortest has {least.input_len:,} tokens of prompt and"
            f" {least.output_len:,} of output, and the context holds {most:,}: ask for less"
        )


def points(
    variants: Sequence[Variant], requests: list[SimRequest], rates: Sequence[float | None], slo: Slo | None
) -> list[Point]:
    """Each variant at each rate."""
    found = []
    for variant in variants:
        for rate in rates:
            run = variant.at(requests, rate)
            found.append(Point(variant.name, rate, run, figures(run, slo)))
    return found


def capacity(variant: Variant, requests: list[SimRequest], slo: Slo, share: float) -> Figures:
    """The highest rate at which at least this share of the requests keeps the limits, by bisection.

    Several replicas get as many times the requests. `is_bound` is 1 where the requests are too few to find it: they
    keep the limits even at `MOST` times the rate at which the variant gets them done all at once.
    """
    if math.isinf(rate_of(requests)):
        requests = repeated(requests, len(requests) * variant.options.replicas)
    all_at_once = variant.at(requests, math.inf)
    at_once = figures(all_at_once)["request_throughput"]
    if not at_once:
        raise ConfigError(f"no request was completed, so there is no capacity to look for: {_why(all_at_once)}")
    low, high = 0.0, MOST * float(at_once)
    best, rate = _attained(variant, requests, high, slo), float(at_once)
    if (best["slo_attainment"] or 0.0) >= share:
        return {"capacity": high, "is_bound": 1, **best}
    best = {}
    while high - low > PRECISION * high and high > LEAST_RATE * float(at_once):
        found = _attained(variant, requests, rate, slo)
        if (found["slo_attainment"] or 0.0) >= share:
            low, best = rate, found
        else:
            high = rate
        rate = (low + high) / 2
    return {"capacity": low, "is_bound": 0, **best}


def _attained(variant: Variant, requests: list[SimRequest], rate: float, slo: Slo) -> Figures:
    return figures(variant.at(requests, rate), slo)


def baselines(variant: Variant) -> list[Variant]:
    """Those of the past, oldest first, then the engine without its prefix tree and with it."""
    options, machine = variant.options, variant.machine
    for name, lacking in (("pipeline_parallel_size", "stages"), ("data_parallel_size", "data-parallel ranks")):
        n = getattr(machine.config, name)
        if n > 1:
            raise ConfigError(
                f"--baselines have no {lacking}, and {dashed(name)} is {n}: leave one of them out",
                param=name,
            )
    size, delay_s = options.baseline_batch, 1e-3 * options.baseline_delay_ms
    sizes = [size // 4, size // 2, size]

    def other(name: str, make: Callable[[SimulatedMachine], Replica]) -> Variant:
        return Variant(name, options, machine, make)

    untreed = dataclasses.replace(machine, config=msgspec.structs.replace(machine.config, enable_prefix_caching=False))
    return [
        other(f"static {size}", lambda one: StaticBatching(one, size)),
        other(f"dynamic {size}", lambda one: DynamicBatching(one, sizes, delay_s)),
        other("reserved (Orca)", Reserved),
        other("paged, whole prompts", PagedWhole),
        Variant("chunked, no tree", options, untreed),
        Variant("chunked and tree", options, machine),
    ]


def baseline_rates(variant: Variant, requests: list[SimRequest]) -> list[float]:
    """Shares of what the engine gets done of all requests at once."""
    at_once = variant.at(requests, math.inf)
    most = figures(at_once)["request_throughput"]
    if not most:
        raise ConfigError(f"no request was completed: {_why(at_once)}")
    return [float(f"{share * most:.3g}") for share in SHARES]


def _why(run: Run) -> str:
    """The first refusal."""
    return next((one.reason for one in run.outcomes if one.refusal), "there is none")
