"""The rule for streams beside a long prompt, with the real scheduler on the clock of an H200."""

from __future__ import annotations

import pytest

from benchmarks.pace import Simulation
from quire.bench.datasets import BenchRequest
from quire.config.resolve import DEFAULT_STALL_FACTOR

BUDGET = 8192


@pytest.mark.parametrize("arithmetic", [0.55, 0.75])
def test_the_default_keeps_the_rule_and_the_long_prompt_is_not_starved(arithmetic: float) -> None:
    """p99 gap at most twice the median step; without the bound it is many times that. 16k tokens alone take 0.5 s."""
    paced = Simulation(DEFAULT_STALL_FACTOR["cuda"], BUDGET, arithmetic).stall()
    assert paced["ratio"] <= 2 and paced["prompt_ttft_ms"] < 1500
    free = Simulation(0.0, BUDGET, arithmetic).stall()
    assert free["ratio"] > 20 and free["prompt_ttft_ms"] < paced["prompt_ttft_ms"]


def test_latencies_of_a_run_are_those_of_its_steps() -> None:
    simulation = Simulation(0.0, BUDGET)
    figures = simulation.run([BenchRequest([5] * 100, 3), BenchRequest([6] * 100, 1)], [0.0, 50.0])
    first, second = simulation.times_s["0"], simulation.times_s["1"]
    assert len(first) == 3 and len(second) == 1 and second[0] == simulation.clock.now_s() > 50.0
    assert figures["p50_tpot_ms"] == pytest.approx(500 * (first[2] - first[0]))
    assert figures["p50_ttft_ms"] == pytest.approx(500 * (first[0] + second[0] - 50.0))
