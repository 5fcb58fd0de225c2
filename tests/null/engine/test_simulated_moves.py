"""Experts that move in a simulation: when the engine moves them, what that takes, and what is gained."""

from __future__ import annotations

import pytest

from quire.bench.shape import FOLDER
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.core.errors import ConfigError
from quire.core.plan import Spans, StepPlan
from quire.engine.simulated import SimulatedMachine
from quire.planner.accelerators import accelerator_named
from quire.planner.expert_loads import ExpertLoads, spread
from quire.planner.formats import Formats
from quire.planner.parts import rank_parts

QWEN = read_arch(FOLDER / "qwen3-30b-a3b")
EPLB = {"num_redundant_experts": 16, "step_interval": 200, "window_size": 100}


def machine(loads: str = "zipf:1.0", ranks: str = "tensor_parallel_size", **options: object) -> SimulatedMachine:
    values: dict[str, object] = {"model": "", "max_model_len": 4096, "enable_expert_parallel": True, ranks: 4}
    config = EngineConfig(**(values | options))  # type: ignore[arg-type]
    return SimulatedMachine.of(config, QWEN, "h200", 140 << 30, is_server=False, expert_loads=loads)


def step_s(made: SimulatedMachine, step: int) -> float:
    plan = StepPlan(step, Spans())
    for slot in range(4):
        plan.spans.add(slot, 0, 2000, True)
    return max(made.ranks_s(plan))


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "data_parallel_size"])
def test_steps_are_slow_until_all_layers_have_moved_and_stand_still_meanwhile(ranks: str) -> None:
    stay, move = machine(ranks=ranks), machine(ranks=ranks, enable_eplb=True, eplb_config=EPLB)
    moves = move.moves
    assert moves is not None and stay.moves is None and moves.n_layers == QWEN.n_layers == 48
    before, after = step_s(move, 199), step_s(move, 249)
    assert after < 0.95 * before and step_s(move, 0) == before and step_s(move, 5000) == after
    assert step_s(move, 200) == pytest.approx(before + moves.choice_s)
    assert [step_s(move, n) for n in (201, 248)] == [pytest.approx(before + moves.layer_s)] * 2
    assert step_s(stay, 0) == step_s(stay, 5000) > 1.05 * after


def test_a_layer_moves_as_many_bytes_as_its_new_slots_have() -> None:
    moves = machine(enable_eplb=True, eplb_config=EPLB).moves
    n = spread(ExpertLoads(words="zipf:1.0", exponent=1.0, n_redundant=16), 128, 8, 4).n_arriving
    links = accelerator_named("h200").links
    assert moves is not None and 0 < n <= 36
    assert moves.layer_s == pytest.approx(n * 3 * 2048 * 768 * 2 / links.bytes_per_s(4) + links.latency_s)


def test_copies_take_memory_as_in_the_plan() -> None:
    few, many = (machine(enable_eplb=True, eplb_config=EPLB | {"num_redundant_experts": n}) for n in (0, 16))
    kept = [rank_parts(QWEN, Mesh(tp=4, ep=4), Formats(), ExpertLoads(n_redundant=n)).weights_bytes for n in (0, 16)]
    page_bytes = 16 * 2 * 48 * 128 * 2  # of one of four key and value heads
    assert kept[1] - kept[0] == 48 * 4 * 3 * 2048 * 768 * 2
    assert (few.n_pages - many.n_pages) * page_bytes == pytest.approx(kept[1] - kept[0], abs=page_bytes)


def test_nothing_moves_where_all_is_even() -> None:
    made = machine("", enable_eplb=True, eplb_config=EPLB | {"num_redundant_experts": 0})
    assert made.moves is None and step_s(made, 0) == step_s(machine(""), 0)


def test_loads_of_a_model_without_experts_are_refused() -> None:
    config = EngineConfig(model="")
    with pytest.raises(ConfigError, match="llama has no experts: leave --expert-loads out"):
        SimulatedMachine.of(
            config, read_arch(FOLDER / "llama-3.1-8b"), "h200", 140 << 30, is_server=False, expert_loads="zipf:1"
        )  # fmt: skip
