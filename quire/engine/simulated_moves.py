"""Experts that move between ranks in a simulation, when the engine moves them: `--enable-eplb` without experts.

Owns when that is, and for how long steps stand still. Does not own where experts go (`planner/expert_placement`) nor
how often they are chosen (`planner/expert_loads`). Loads stay as they are, so that what is moved once stays.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from quire.config.eplb import EplbConfig
from quire.planner.cost import CostModel
from quire.planner.expert_loads import ExpertLoads, spread

CHOICE_S: Final = 4e-6
"""Of a slot: where its expert goes, on the host; 2 to 6 us on one core, for 4 to 32 ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertMoves:
    """Of an engine, once: its second rearrangement finds nothing to gain."""

    before: CostModel
    """While experts lie as they were loaded."""
    first_step: int
    """Before which experts are chosen; one layer moves before each of those that follow."""
    n_layers: int
    choice_s: float
    layer_s: float

    def cost(self, step: int, after: CostModel) -> CostModel:
        """Of a step, in its order from the start of the engine. Half-moved layers count as not moved."""
        return after if step > self.first_step + self.n_layers else self.before

    def still_s(self, step: int) -> float:
        """For how long all ranks stand still before it."""
        if step == self.first_step:
            return self.choice_s
        return self.layer_s if self.first_step < step <= self.first_step + self.n_layers else 0.0


def expert_moves(before: CostModel, after: CostModel, loads: ExpertLoads, eplb: EplbConfig) -> ExpertMoves | None:
    """None: there are no experts, or none moves."""
    timer = after.timer
    experts = [one for one in timer.parts.products if one.is_experts]
    if not experts or timer.links is None:
        return None
    found = spread(loads, experts[0].n_of_all, experts[0].n_chosen, timer.mesh.ep)
    if not found.n_arriving:
        return None
    n_layers = sum(one.n_times for one in experts if one.reduces)
    n_bytes = found.n_arriving * sum(one.n_bytes * one.n_times for one in experts) / n_layers
    return ExpertMoves(
        before=before, first_step=eplb.step_interval, n_layers=n_layers,
        choice_s=CHOICE_S * n_layers * sum(map(len, found.ranks)),
        layer_s=timer.links.latency_s + n_bytes / timer.links.bytes_per_s(timer.mesh.ep),
    )  # fmt: skip
