"""An engine of a machine that is not here: the real loop, scheduler, pages and prefix tree over a timed null device.

Owns what such a machine is taken to have: its memory, and the seconds of a step. Does not own requests nor figures
(`bench/simulate`), and not the arithmetic of costs (`planner/cost`). Imports no torch.
"""

from __future__ import annotations

import dataclasses

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.kv import KVLayout
from quire.config.mesh import Mesh, mesh_of, placed
from quire.config.resolve import MIN_SHARED_TOKENS, NOT_ROUNDED, EngineLimits, resolve
from quire.config.shares import share_arch
from quire.config.stages import LayerRange, layer_range, stage_arch, stage_layout
from quire.core.clock import VirtualClock
from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire.core.units import format_bytes
from quire.engine.assembly import assemble, pace_of
from quire.engine.capacity import ITEMSIZES, StagePool, layout_of, size_pool, snapshots_within, tightest
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
        mesh = mesh_of(config)
        if mesh.n_ranks > 1 and device == "cpu":
            name = "tensor_parallel_size" if mesh.tp > 1 else "pipeline_parallel_size"
            raise ConfigError(
                f"{name} = {getattr(config, name)} is not simulated on a CPU: leave it out, or choose a --gpu",
                param=name,
            )
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size = {config.data_parallel_size} is not simulated: leave it out, and see `quire plan`"
                " for what data-parallel ranks would do",
                param="data_parallel_size",
            )
        limits = resolve(config, arch, device, is_server=is_server)
        own = share_arch(placed(arch, config), 0, mesh.tp)
        layout = layout_of(config, limits, own)
        room, itemsize = Room(memory_bytes, memory_bytes, is_main=device == "cpu"), ITEMSIZES[limits.dtype]
        ranges = [layer_range(own, stage, mesh.pp) for stage in range(mesh.pp)]
        pools = [_pool(own, layout, layers, mesh, itemsize, room) for layers in ranges]
        weights_bytes = max(pool.weights_bytes for pool in pools)
        if weights_bytes >= memory_bytes:
            raise ConfigError(
                f"the weights take {format_bytes(weights_bytes)}, {hardware} has {format_bytes(memory_bytes)}: "
                "choose a larger --gpu or a smaller model, or divide it over several GPUs with --tensor-parallel-size"
            )
        stage = tightest(config, limits, pools, ())
        n_snapshots = snapshots_within(config, limits, own, stage.room)
        n_pages, limits = size_pool(
            config, limits, stage.arch, stage.room, weights_bytes=stage.weights_bytes, n_snapshots=n_snapshots,
            kv=stage.kv,
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
        executor = TimedNullExecutor(clock, self.step_s, self.config.pipeline_parallel_size)
        limits, device = self.limits, self.device
        core = assemble(
            self.config, limits, self.layout, executor, clock, self.n_pages, StructuredOutput(None),
            0 if self.config.deterministic else MIN_SHARED_TOKENS[device],
            self.pace,
            has_states=bool(self.arch.state_specs), n_snapshots=self.n_snapshots,
        )  # fmt: skip
        return SimulatedEngine(core, clock, executor)


def _pool(own: ModelArch, layout: KVLayout, layers: LayerRange, mesh: Mesh, itemsize: int, room: Room) -> StagePool:
    """Of a rank of the stage that has these layers, of which `own` is a rank's part. room: before weights are there."""
    arch, tied = stage_arch(own, layers), own.tie_embeddings
    n_tables = layers.is_first or layers.is_last if tied else layers.is_first + layers.is_last
    n_foreign = (1 if tied else 2) - n_tables / mesh.tp  # the description has whole vocabularies, at both ends
    weights_bytes = round((arch.n_parameters - n_foreign * own.vocab_size * own.hidden_size) * itemsize)
    room = dataclasses.replace(room, free_bytes=room.total_bytes - weights_bytes)
    return StagePool(arch, stage_layout(layout, layers), weights_bytes, 0, room)
