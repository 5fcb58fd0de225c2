"""An engine of a machine that is not here: the real loop, scheduler, pages and prefix tree over a timed null device.

Owns what such a machine is taken to have: its memory, and the seconds of a step. Does not own requests nor figures
(`bench/simulate`), and not the arithmetic of costs (`planner/cost`). Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.context import attending, deals_tokens, page_tokens, settled
from quire.config.engine import EngineConfig
from quire.config.eplb import balanced
from quire.config.kv import KVLayout
from quire.config.mesh import mesh_of, placed
from quire.config.parameters import Kept, layer_parameters
from quire.config.resolve import MIN_SHARED_TOKENS, EngineLimits, resolve
from quire.config.shares import share_arch
from quire.config.stages import LayerRange, layer_range, refuse_uneven, stage_arch, stage_layout
from quire.core.clock import VirtualClock
from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire.core.plan_parts import spans_of
from quire.core.units import format_bytes
from quire.engine.assembly import assemble, pace_of
from quire.engine.capacity import ITEMSIZES, StagePool, layout_of, size_pool, snapshots_within, tightest
from quire.engine.concurrency import with_fitting_seqs
from quire.engine.core import EngineCore
from quire.engine.executors.null_timed import TimedNullExecutor
from quire.engine.grammars.manager import StructuredOutput
from quire.engine.simulated_moves import ExpertMoves, expert_moves
from quire.planner.accelerators import USUAL_CPU, accelerator_named, calibration_for, host_accelerator
from quire.planner.calibration import Calibration
from quire.planner.cost import CostModel
from quire.planner.engine_cost import engine_cost, engine_formats
from quire.planner.expert_loads import read_loads
from quire.planner.formats import Formats
from quire.planner.memory import Room
from quire.planner.mesh import n_experts_of
from quire.planner.pace import Pace
from quire.planner.shape import layer_kinds

SIZES: Final = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size",
)  # fmt: skip
"""Options that ask for several ranks."""


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
    moves: ExpertMoves | None = None
    """None: experts stay where they are."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        arch: ModelArch,
        hardware: str,
        memory_bytes: int,
        *,
        is_server: bool,
        expert_loads: str = "",
        calibration: Calibration | None = None,
    ) -> SimulatedMachine:
        """hardware: a name in `planner/accelerators`, or 'cpu'. memory_bytes: of the device.
        is_server: defaults for streams that people wait for, as in `build_engine`. expert_loads: see `read_loads`.
        calibration: of that machine; None: what comes with Quire.

        ConfigError for what does not fit, or cannot be simulated.
        """
        device = "cpu" if hardware == "cpu" else "cuda"
        _check(config)
        config = settled(config, arch)
        mesh = mesh_of(config)
        if mesh.n_ranks > 1 and device == "cpu":
            name = next(one for one in SIZES if getattr(config, one) > 1)
            raise ConfigError(
                f"{name} = {getattr(config, name)} is not simulated on a CPU: leave it out, or choose a --gpu",
                param=name,
            )
        on_hopper = device == "cuda" and accelerator_named(hardware).is_hopper
        limits = resolve(config, arch, device, is_server=is_server, on_hopper=on_hopper)
        own = share_arch(placed(arch, config), 0, mesh.tp)
        layout = layout_of(config, limits, attending(own, config, 0))
        room = Room(memory_bytes, memory_bytes, is_main=device == "cpu")
        refuse_uneven(arch, mesh.pp, config.pp_layer_partition, "simulated stages take as long as one another")
        ranges = [layer_range(own, stage, mesh.pp, "") for stage in range(mesh.pp)]
        calibration = calibration or (USUAL_CPU if device == "cpu" else calibration_for(accelerator_named(hardware)))
        accelerator = host_accelerator(calibration) if device == "cpu" else accelerator_named(hardware)
        formats = engine_formats(config, limits, arch, accelerator)
        pools = [_pool(own, config, layout, layers, formats, room) for layers in ranges]
        weights_bytes = max(pool.weights_bytes for pool in pools)
        if weights_bytes >= memory_bytes:
            raise ConfigError(
                f"the weights take {format_bytes(weights_bytes)}, {hardware} has {format_bytes(memory_bytes)}: "
                "choose a larger --gpu or a smaller model, or divide it over several GPUs with --tensor-parallel-size"
            )
        n_pages, n_snapshots, limits = _sized(config, limits, own, pools)
        pace = pace_of(limits, arch, calibration, ITEMSIZES[limits.dtype])
        eplb = balanced(config)
        loads = read_loads(expert_loads, None if eplb is None else eplb.num_redundant_experts)
        loads.check(arch.family, map(n_experts_of, arch.layers))
        cost = engine_cost(arch, config, limits, accelerator, calibration, loads)
        moves = None
        if eplb is not None:
            as_loaded = msgspec.structs.replace(loads, are_in_turn=True)
            before = engine_cost(arch, config, limits, accelerator, calibration, as_loaded)
            moves = expert_moves(before, cost, loads, eplb)
        return cls(config, arch, limits, layout, device, n_pages, n_snapshots, cost, pace, moves)

    @property
    def kv_slots(self) -> int:
        """Tokens that pages have room for, over all ranks."""
        return (self.n_pages - 1) * self.page_tokens * self.config.data_parallel_size

    @property
    def page_tokens(self) -> int:
        """Of a page, as sequences have them."""
        return page_tokens(self.config)

    def ranks_s(self, plan: StepPlan) -> list[float]:
        """Seconds of a step on each data-parallel rank. What several sequences share is read once."""
        cost, moves, still_s = self.cost, self.moves, 0.0
        if moves is not None:
            cost, still_s = moves.cost(plan.step, cost), moves.still_s(plan.step)
        n = self.config.data_parallel_size
        if n == 1:
            return [still_s + cost.step_s(plan.spans, plan.shared_prefixes)]
        ranks_s = cost.ranks_s(spans_of(plan, n, self.limits.max_num_seqs))
        return [still_s + one for one in ranks_s] if still_s else ranks_s

    def engine(self) -> SimulatedEngine:
        """A new one."""
        clock = VirtualClock()
        executor = TimedNullExecutor(
            clock, self.ranks_s, self.config.pipeline_parallel_size, self.config.data_parallel_size,
            self.cost.first_token_s,
        )  # fmt: skip
        limits = self.limits
        min_shared = 0 if self.config.deterministic or deals_tokens(self.config) else MIN_SHARED_TOKENS[self.device]
        core = assemble(
            self.config, limits, self.layout, executor, clock, self.n_pages, StructuredOutput(None), min_shared,
            self.pace, has_states=bool(self.arch.state_specs), n_snapshots=self.n_snapshots,
        )  # fmt: skip
        return SimulatedEngine(core, clock, executor)


def _check(config: EngineConfig) -> None:
    """ConfigError for what would be taken in silence, and change nothing that is said."""
    if config.speculative_config:
        raise ConfigError("drafts are not simulated, since nobody knows which are right: leave them out")
    if config.enable_lora:
        raise ConfigError(
            "enable_lora is not simulated: requests name no adapters, whose products take time and memory: leave"
            " --enable-lora out",
            param="enable_lora",
        )


def _sized(
    config: EngineConfig, limits: EngineLimits, own: ModelArch, pools: Sequence[StagePool]
) -> tuple[int, int, EngineLimits]:
    """(pages, kept states, limits) of the ranks. ConfigError for what does not fit."""
    limits = with_fitting_seqs(config, limits, own, pools)
    n_snapshots = snapshots_within(config, limits, pools)
    stage = tightest(config, limits, pools, (), n_snapshots)
    n_pages, limits = size_pool(
        config, limits, stage.arch, stage.room, weights_bytes=stage.weights_bytes, n_snapshots=n_snapshots,
        kv=stage.kv,
    )  # fmt: skip
    return n_pages, n_snapshots, limits


def _spared_bytes(arch: ModelArch, formats: Formats) -> float:
    """By rounding the matrices of layers."""
    if not formats.weights.is_rounded:
        return 0.0
    return sum(
        n * (one.n_in * one.n_out * formats.itemsize - formats.kept(one).n_bytes(one.n_out, one.n_in))
        for spec, n in layer_kinds(arch)
        for one in layer_parameters(spec, arch.hidden_size, 0).matrices
        if one.kept is Kept.BY_SCHEME
    )


def _pool(
    own: ModelArch, config: EngineConfig, layout: KVLayout, layers: LayerRange, formats: Formats, room: Room
) -> StagePool:
    """Of a rank of the stage that has these layers, of which `own` is a rank's part. room: before weights are there."""
    arch, tied = stage_arch(own, layers), own.tie_embeddings
    n_tables = layers.is_first or layers.is_last if tied else layers.is_first + layers.is_last
    # the description has whole vocabularies, at both ends
    n_foreign = (1 if tied else 2) - n_tables / config.tensor_parallel_size
    table = own.vocab_size * own.hidden_size
    n_bytes = (arch.n_parameters - n_foreign * table) * formats.itemsize - _spared_bytes(arch, formats)
    if (
        layers.is_last and formats.head.is_rounded
    ):  # it is a matrix of its own then, though the embedding has its numbers
        rounded = formats.head.n_bytes(own.vocab_size, own.hidden_size)
        n_bytes += (rounded - (0 if tied else table * formats.itemsize)) / config.tensor_parallel_size
    weights_bytes = round(n_bytes)
    room = dataclasses.replace(room, free_bytes=room.total_bytes - weights_bytes)
    arch = attending(arch, config, 0)  # weights of all heads, and pages of its own
    return StagePool(arch, stage_layout(layout, layers), weights_bytes, 0, room)
