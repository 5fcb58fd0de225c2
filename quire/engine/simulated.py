"""An engine of a machine that is not here: the real loop, scheduler, pages and prefix tree over a timed null device.

Owns what such a machine is taken to have: its memory, and the seconds of a step. Does not own requests nor figures
(`bench/simulate`), and not the arithmetic of costs (`planner/cost`). Imports no torch.
"""

from __future__ import annotations

import dataclasses

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.kv import KVLayout
from quire.config.mesh import mesh_shape, placed
from quire.config.resolve import MIN_SHARED_TOKENS, NOT_ROUNDED, EngineLimits, resolve
from quire.config.shares import share_arch
from quire.core.clock import VirtualClock
from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire.core.units import format_bytes
from quire.engine.assembly import assemble, pace_of
from quire.engine.capacity import ITEMSIZES, layout_of, size_pool, snapshots_within
from quire.engine.core import EngineCore
from quire.engine.executors.null_timed import TimedNullExecutor
from quire.engine.grammars.manager import StructuredOutput
from quire.planner.accelerators import USUAL_CPU, accelerator_named, calibration_for, host_accelerator
from quire.planner.cost import CostModel
from quire.planner.engine_cost import engine_cost
from quire.planner.memory import Room
from quire.planner.pace import Pace


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One engine and its clock, at the beginning of time."""

    core: EngineCore
    clock: VirtualClock
    executor: TimedNullExecutor


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """What engines of one model, one machine and one set of options have in common."""

    config: EngineConfig
    arch: ModelArch
    limits: EngineLimits
    layout: KVLayout
    device: str
    """Its kind, 'cuda' or 'cpu'."""
    n_pages: int
    """The dummy page counted in."""
    n_snapshots: int
    cost: CostModel
    pace: Pace | None

    @classmethod
    def of(
        cls, config: EngineConfig, arch: ModelArch, hardware: str, memory_bytes: int, *, is_server: bool
    ) -> SimulatedMachine:
        """hardware: a name in `planner/accelerators`, or 'cpu'. memory_bytes: of the device.
        is_server: defaults for streams that people wait for, as in `build_engine`.

        ConfigError for what does not fit, or cannot be simulated.
        """
        device = "cpu" if hardware == "cpu" else "cuda"
        if config.speculative_config:
            raise ConfigError("drafts are not simulated, since nobody knows which are right: leave them out")
        if config.quantization not in NOT_ROUNDED:
            raise ConfigError("weights that are rounded while loading are not simulated: leave --quantization out")
        if config.prefill_context_parallel_size > 1:
            raise ConfigError(
                f"prefill_context_parallel_size = {config.prefill_context_parallel_size} is not simulated: leave it"
                " out, and see `quire plan --mesh sp=N` or `ring=N` for what such ranks would do",
                param="prefill_context_parallel_size",
            )
        n_ranks = mesh_shape(config).n_ranks
        if n_ranks > 1 and device == "cpu":
            raise ConfigError(
                f"tensor_parallel_size = {n_ranks} is not simulated on a CPU: leave it out, or choose a --gpu",
                param="tensor_parallel_size",
            )
        if config.pipeline_parallel_size > 1:
            raise ConfigError(
                f"pipeline_parallel_size = {config.pipeline_parallel_size} is not simulated: leave it out, and see"
                " `quire plan` for what stages would do",
                param="pipeline_parallel_size",
            )
        limits = resolve(config, arch, device, is_server=is_server)
        own = share_arch(placed(arch, config), 0, n_ranks)
        layout = layout_of(config, limits, own)
        weights_bytes = _parameters(own, n_ranks) * ITEMSIZES[limits.dtype]
        if weights_bytes >= memory_bytes:
            raise ConfigError(
                f"the weights take {format_bytes(weights_bytes)}, {hardware} has {format_bytes(memory_bytes)}: "
                "choose a larger --gpu or a smaller model, or divide it over several GPUs with --tensor-parallel-size"
            )
        room = Room(memory_bytes, memory_bytes - weights_bytes, is_main=device == "cpu")
        n_snapshots = snapshots_within(config, limits, own, room)
        n_pages, limits = size_pool(
            config, limits, own, room, weights_bytes=weights_bytes, n_snapshots=n_snapshots
        )  # fmt: skip
        calibration = USUAL_CPU if device == "cpu" else calibration_for(accelerator_named(hardware))
        accelerator = host_accelerator(calibration) if device == "cpu" else accelerator_named(hardware)
        cost = engine_cost(arch, config, limits, accelerator, calibration)
        pace = pace_of(limits, arch, calibration, ITEMSIZES[limits.dtype])
        return cls(config, arch, limits, layout, device, n_pages, n_snapshots, cost, pace)

    def step_s(self, plan: StepPlan) -> float:
        """Seconds of a step. What several sequences share is read once."""
        return self.cost.step_s(plan.spans, plan.shared_prefixes)

    def engine(self) -> SimulatedEngine:
        """A new one."""
        clock = VirtualClock()
        executor = TimedNullExecutor(clock, self.step_s)
        limits, device = self.limits, self.device
        core = assemble(
            self.config, limits, self.layout, executor, clock, self.n_pages, StructuredOutput(None),
            0 if self.config.deterministic else MIN_SHARED_TOKENS[device],
            self.pace,
            has_states=bool(self.arch.state_specs), n_snapshots=self.n_snapshots,
        )  # fmt: skip
        return SimulatedEngine(core, clock, executor)


def _parameters(own: ModelArch, n_ranks: int) -> int:
    """Of one rank, whose description has its part of the layers: vocabularies are divided too."""
    n_tables = 1 if own.tie_embeddings else 2
    return own.n_parameters - n_tables * own.vocab_size * own.hidden_size * (n_ranks - 1) // n_ranks
