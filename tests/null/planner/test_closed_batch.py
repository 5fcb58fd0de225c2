"""A batch that comes at once, by the closed form: of a pipeline beside the simulator, and by hand."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest

from quire.bench.shape import FOLDER
from quire.bench.simulate.fleet import Fleet
from quire.bench.simulate.replica import EngineReplica
from quire.bench.simulate.requests import of_lengths
from quire.bench.simulate.router import RoundRobin
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.core.plan import Spans
from quire.engine.simulated import SimulatedMachine
from quire.planner.accelerators import accelerator_named
from quire.planner.serving import closed_batch_s

MODEL = pathlib.Path(FOLDER) / "llama-3.1-8b"
ROWS = 8192
LENGTHS = {
    "alike": [(1024, 200)] * 64,
    "every other one ends early": [(1024, 300 if i % 2 else 16) for i in range(64)],
    "long ones first": [(1024, 300)] * 32 + [(1024, 16)] * 32,
    "fewer than stages": [(3900, 40)],
    "prompts alone": [(3000, 1)] * 24,
}


@pytest.mark.parametrize("n_stages", [1, 2, 4])
@pytest.mark.parametrize("name", LENGTHS)
def test_it_takes_as_long_as_the_real_scheduler(name: str, n_stages: int) -> None:
    config = EngineConfig(
        model=str(MODEL), pipeline_parallel_size=n_stages, max_model_len=4096, enable_prefix_caching=False
    )
    memory_bytes = int(accelerator_named("h200").memory_bytes)
    machine = SimulatedMachine.of(config, read_arch(MODEL), "h200", memory_bytes, is_server=False)
    run = Fleet([EngineReplica(machine)], RoundRobin(1)).run(of_lengths(LENGTHS[name]))
    took_s = max(one.end_s or 0.0 for one in run.outcomes)
    assert closed_batch_s(machine.cost, LENGTHS[name], 1024, ROWS, 1 << 60) == pytest.approx(took_s, rel=0.1)


class OneSecond:
    """Of every step, whatever is in it."""

    page_size = 16

    def __init__(self, n_stages: int) -> None:
        self.timer = types.SimpleNamespace(mesh=types.SimpleNamespace(pp=n_stages))
        self.steps: list[list[int]] = []

    def step_s(self, spans: Spans, shared_prefixes: Any = ()) -> float:
        self.steps.append(list(spans.lengths))
        return 1.0


@pytest.mark.parametrize("n_stages, seconds, steps", [
    (1, 4, [[100, 60], [1, 40], [1, 1], [1]]),
    (2, 6 + 1, [[100, 60], [40], [1], [1], [1], [1]]),
])  # fmt: skip
def test_a_token_is_known_when_its_step_is_through_all_stages(
    n_stages: int, seconds: float, steps: list[list[int]]
) -> None:
    """Two prompts of 100 in steps of 160; three tokens each. Of two stages the one has a step of the first,
    while the other has one of the second."""
    cost = OneSecond(n_stages)
    took_s = closed_batch_s(cost, [(100, 3), (100, 3)], 8, 160, 1 << 60)  # type: ignore[arg-type]
    assert (took_s, cost.steps) == (seconds, steps)
