"""Assembles an engine from options: joins a worker, control and text.

Owns the order in which things are made. Does not own any of the parts, nor what a device is like (`compute/platform`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
from collections.abc import Callable

import msgspec
import numpy as np

from quire.compute.expert_balancer import ExpertBalancer
from quire.compute.facts import WorkerFacts
from quire.compute.platform import platform_of
from quire.compute.weights.hub import find_checkpoint
from quire.compute.worker import Allocation, Worker
from quire.config.arch import ModelArch
from quire.config.context import deals_tokens, page_tokens, settled
from quire.config.division import check_division, check_ranks
from quire.config.engine import EngineConfig
from quire.config.generation import generation_defaults
from quire.config.kv import KVLayout, tokens_in_flight
from quire.config.mesh import mesh_of
from quire.config.model import read_arch
from quire.config.resolve import NOT_ROUNDED, EngineLimits, resolve
from quire.config.stages import layer_range, stage_arch, stage_layout
from quire.core.clock import MonotonicClock, VirtualClock
from quire.core.errors import ConfigError
from quire.core.events import EndKind, EngineReady, ModelFacts
from quire.core.plan import MASK_WORD_BITS
from quire.core.units import parse_bytes
from quire.engine.adapters import AdapterReader, registry_of
from quire.engine.assembly import assemble, pace_of
from quire.engine.capacity import (
    ITEMSIZES,
    StagePool,
    kv_itemsize,
    layout_of,
    size_pool,
    snapshots_within,
    tightest,
    whole_bytes,
)
from quire.engine.concurrency import with_fitting_seqs
from quire.engine.core import EngineCore
from quire.engine.executors.balancing import BalancingExecutor
from quire.engine.executors.executor import Executor, RanksLost
from quire.engine.executors.inline import LaunchExecutor, ThreadExecutor
from quire.engine.executors.null import NullExecutor
from quire.engine.executors.ranks import RanksExecutor
from quire.engine.expert_load import ExpertLoad
from quire.engine.fit import check_fit
from quire.engine.frontend import load_tokenizer, text_folder
from quire.engine.grammars.manager import StructuredOutput, n_matcher_processes
from quire.engine.grammars.processes import GrammarProcesses
from quire.engine.grammars.wire import GrammarSettings
from quire.engine.ranks.adapters import AdaptersOfRanks
from quire.engine.ranks.group import RankGroup
from quire.engine.ranks.leader import LeadingWorker
from quire.engine.sleep import SleepMode
from quire.engine.workers import fit_case, make_balancer, make_leader
from quire.kernels.invariance import RowsAlone
from quire.planner.accelerators import accelerator_named, calibration_for, engine_calibration
from quire.planner.cost import calibrated
from quire.text.tokenizer import HfTokenizer

logger = logging.getLogger("quire.engine")

NULL_PAGES = 1 << 15
SIMULATED = "h200"
"""The machine whose clock an engine without a model has."""


def build_engine(
    config: EngineConfig, *, is_server: bool = False, is_restart: bool = False, place: pathlib.Path | None = None
) -> tuple[EngineCore, EngineReady]:
    """Load everything. is_server: defaults for streams that people wait for, not for batches. is_restart: an engine
    before this one has served with these options. place: for temporary files, if not the usual one.

    Raises ConfigError or LoadError saying what does not fit, RanksLost where another rank is gone.
    """
    folder = find_checkpoint(config.model, config.revision, config.download_dir)
    arch = read_arch(folder, config.hf_overrides, logger)
    check_ranks(config)
    if not config.is_simulated:
        check_division(config, arch)
    config = settled(config, arch)
    shape = mesh_of(config)
    if config.is_simulated:
        return _build_simulated(config, arch, is_server)
    with contextlib.ExitStack() as undo:
        group = None
        if shape.n_ranks > 1:
            group = RankGroup(config, shape, folder, is_server=is_server, place=place)
            undo.callback(group.stop)
        try:
            built = _build(config, folder, arch, group, undo, is_server=is_server, is_restart=is_restart)
        except RanksLost as loss:
            if loss.kind is EndKind.REFUSED:
                raise ConfigError(loss.message) from None
            raise
        undo.pop_all()
        if group is not None:
            group.has_served = True
    return built


def _build(
    config: EngineConfig,
    folder: pathlib.Path,
    arch: ModelArch,
    group: RankGroup | None,
    undo: contextlib.ExitStack,
    *,
    is_server: bool,
    is_restart: bool,
) -> tuple[EngineCore, EngineReady]:
    """group: the ranks beside this one, if there are any. undo: gives back what is taken if this fails."""
    made = make_leader(config, folder, arch, group, is_server=is_server)
    worker, limits, draft, platform = made.worker, made.limits, made.draft, made.worker.platform
    undo.callback(worker.close)
    check_fit(fit_case(config, made))
    facts, layout = worker.load(), layout_of(config, limits, worker.shared)
    pools = _stage_pools(worker.shared, layout, facts, config.pp_layer_partition)
    if len(pools) > 1:
        logger.info("stages of %s layers", ", ".join(str(pool.arch.n_layers) for pool in pools))
    limits = with_fitting_seqs(config, limits, worker.shared, pools, lambda asked: worker.captured(asked).graph_sizes)
    captured, n_snapshots = worker.captured(limits), snapshots_within(config, limits, pools)
    stage = tightest(config, limits, pools, captured.graph_sizes, n_snapshots)
    n_pages, limits = size_pool(
        config, limits, stage.arch, stage.room, captured.graph_sizes, captured.mixed_rows, stage.weights_bytes,
        stage.others_bytes, 0 if draft is None else draft.numbers(ITEMSIZES[limits.dtype], kv_itemsize(limits, arch)),
        n_snapshots, stage.kv,
    )  # fmt: skip
    tokenizer = load_tokenizer(config, folder, arch)  # for its size: logits beyond it are padding
    if tokenizer is not None and len(tokenizer) < arch.vocab_size:
        logger.info("token ids %d to %d have no token: they are never chosen", len(tokenizer), arch.vocab_size - 1)
    vocab_limit = None if tokenizer is None else len(tokenizer)
    worker.allocate(Allocation(n_pages, limits.max_model_len, vocab_limit, layout, n_snapshots, limits.max_num_seqs))
    executor_of = functools.partial(_executor, balancer := make_balancer(config, made))
    all_bytes = whole_bytes(config, arch, sum(one.model_bytes for one in facts.stages))
    pace = pace_of(limits, arch, engine_calibration(platform.name, platform.device_name), all_bytes / arch.n_parameters)
    n_masks = limits.max_num_seqs + limits.max_sampled  # where prompts enter beside as many drafts as there may be
    n_masks *= config.data_parallel_size
    structured = _structured_output(config, tokenizer, folder, arch, n_masks, platform.device.pin)
    if is_server:
        structured.start()
    core = assemble(
        config, limits, layout, executor_of(worker), MonotonicClock(), n_pages, structured,
        0 if deals_tokens(config) else platform.min_shared_tokens, pace,
        worker.draft_costs(), deterministic_apart=worker.rows_alone is not RowsAlone.NEVER,
        has_states=bool(arch.state_specs), n_snapshots=n_snapshots,
    )  # fmt: skip
    core.free_memory, core.ranks = worker.close, group
    if config.enable_lora:
        core.adapters = registry_of(
            config, _adapter_reader(worker), core.scheduler, lambda: core.grammars.compiling, is_restart=is_restart
        )
    if worker.expert_loads():
        core.expert_load = ExpertLoad(worker.expert_loads, worker.model.expert_layers(), balancer)
    if config.enable_sleep_mode:
        core.sleep_mode = SleepMode(worker, executor_of)
    ready = _ready(config, limits, arch, platform.name, n_pages, all_bytes)
    return core, msgspec.structs.replace(
        ready, device_name=platform.device_name, no_determinism=worker.no_determinism,
        deterministic_apart=core.scheduler.config.deterministic_apart,
    )  # fmt: skip


def _stage_pools(shared: ModelArch, layout: KVLayout, facts: WorkerFacts, partition: str) -> list[StagePool]:
    """shared: what a rank has of every layer; partition: `EngineConfig.pp_layer_partition`."""
    found = []
    for stage, own in enumerate(facts.stages):
        layers = layer_range(shared, stage, len(facts.stages), partition)
        pool = stage_arch(shared, layers), stage_layout(layout, layers)
        found.append(StagePool(*pool, own.weights_bytes, own.others_bytes, own.room))
    return found


def device_of(config: EngineConfig) -> str:
    """Kind of device of an engine with a model ('cpu', 'cuda'). Sets the number of threads, as the engine will."""
    return platform_of(config).name


def _executor(balancer: ExpertBalancer | None, worker: Worker) -> Executor:
    """Steps of the worker in this process, and of the ranks that it leads. balancer: where experts move."""
    own = LaunchExecutor(worker) if worker.platform.computes_alone else ThreadExecutor(worker, worker.prepare)
    if not isinstance(worker, LeadingWorker):
        return own
    n_slots = 0 if worker.data is None else worker.data.n_slots
    ranks = RanksExecutor(own, worker.group, n_slots, worker.rest)
    return ranks if balancer is None else BalancingExecutor(ranks, own.in_turn, worker.group, balancer, balancer.eplb)


def _adapter_reader(worker: Worker) -> AdapterReader:
    """Of all ranks."""
    return AdaptersOfRanks(worker.adapters, worker.group) if isinstance(worker, LeadingWorker) else worker.adapters


def _structured_output(
    config: EngineConfig,
    tokenizer: HfTokenizer | None,
    folder: pathlib.Path,
    arch: ModelArch,
    n_masks: int,
    pin: Callable[[np.ndarray], None],
) -> StructuredOutput:
    if tokenizer is None:
        return StructuredOutput(None)
    settings = GrammarSettings(
        folder=str(text_folder(config, folder)),
        vocab_size=arch.vocab_size,
        end_token_ids=list(generation_defaults(config, folder, arch).eos_token_ids),
        n_words=-(-len(tokenizer) // MASK_WORD_BITS),
        n_rows=n_masks,
        n_processes=n_matcher_processes(),
        compile_s=config.structured_outputs_compile_seconds,
        compile_bytes=parse_bytes(config.structured_outputs_compile_memory),
    )
    return StructuredOutput(GrammarProcesses(settings), pin)


def _build_simulated(config: EngineConfig, arch: ModelArch, is_server: bool) -> tuple[EngineCore, EngineReady]:
    """The whole engine without a model, on the virtual clock of `SIMULATED`."""
    limits = resolve(config, arch, config.device, is_server=is_server)
    n_pages = config.num_gpu_blocks_override or NULL_PAGES
    clock, simulated = VirtualClock(), accelerator_named(SIMULATED)
    layout = layout_of(config, limits, arch)
    n_held = layout.tokens_within(n_pages - 1, config.block_size, tokens_in_flight(config.pipeline_depth))
    limits = msgspec.structs.replace(limits, max_model_len=min(limits.max_model_len, n_held))
    executor = NullExecutor(
        windows=layout.windows,
        n_pages=n_pages,
        page_size=config.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        vocab_size=arch.vocab_size,
        clock=clock,
        cost=calibrated(arch, simulated),
    )
    structured = StructuredOutput(None)  # what it says means nothing anyway
    pace = pace_of(limits, arch, calibration_for(simulated), 2)
    core = assemble(
        config, limits, layout, executor, clock, n_pages, structured, pace=pace, has_states=bool(arch.state_specs)
    )  # fmt: skip
    return core, _ready(config, limits, arch, config.device, n_pages)


def _ready(
    config: EngineConfig, limits: EngineLimits, arch: ModelArch, device: str, n_pages: int, weight_bytes: int = 0
) -> EngineReady:
    """What clients need to know."""
    weights = limits.dtype if config.quantization in NOT_ROUNDED else str(config.quantization)
    return EngineReady(
        max_model_len=limits.max_model_len,
        n_pages=n_pages * config.data_parallel_size,
        page_size=page_tokens(config),
        logits_width=arch.vocab_size,
        device=device,
        max_num_seqs=limits.max_num_seqs * config.data_parallel_size,
        model=ModelFacts(arch.family, arch.n_parameters, arch.hidden_size, weight_bytes, weights),
    )
