"""Assembles an engine from options: device, model, KV pool, runner, executor, scheduler.

Owns the order in which things are made and what is said about it. Does not own any of the parts.
"""

from __future__ import annotations

import functools
import logging
import pathlib
import time

import torch

from quire.compute.device import cuda
from quire.compute.device.cpu import CpuDevice
from quire.compute.device.device import Device
from quire.compute.models.decoder import Decoder
from quire.compute.runner.graphs import StepGraphs, decode_sizes, mixed_sizes
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import Runner
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tape import StepTape, obstacle
from quire.compute.sample.sampler import Sampler
from quire.compute.weights.footprint import Weights
from quire.compute.weights.hub import find_checkpoint
from quire.compute.weights.loader import load_model
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.generation import generation_defaults
from quire.config.model import read_arch
from quire.config.resolve import NOT_ROUNDED, Limits, resolve
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core import host
from quire.core.clock import Clock, MonotonicClock, VirtualClock
from quire.core.events import EngineReady, ModelFacts
from quire.core.plan import MASK_WORD_BITS
from quire.core.ticker import ticking
from quire.core.units import format_bytes, parse_bytes
from quire.engine.capacity import kv_itemsize, size_pool
from quire.engine.core import EngineCore
from quire.engine.executors.executor import Executor
from quire.engine.executors.inline import LaunchExecutor, ThreadExecutor
from quire.engine.executors.null import NullExecutor
from quire.engine.fit import Case, Room, SizesOf, check_fit
from quire.engine.frontend import load_tokenizer, text_folder
from quire.engine.grammars.manager import StructuredOutput, n_mask_threads
from quire.engine.grammars.processes import GrammarProcesses
from quire.engine.grammars.wire import GrammarSettings
from quire.engine.sleep import Residence
from quire.kernels import native
from quire.planner.cost import CostModel
from quire.planner.hardware import hardware_named
from quire.planner.pace import Pace, pace_for
from quire.text.tokenizer import HfTokenizer

logger = logging.getLogger("quire.engine")

NULL_PAGES = 1 << 15
WARM_UP_TOKENS = 512
MIN_SHARED_TOKENS = 256
"""Shortest common prefix that the CUDA attention is told of; the CPU's reads each sequence's own."""
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = TORCH_DTYPES | {"int8": torch.int8}


def build_engine(config: EngineConfig, *, is_server: bool = False) -> tuple[EngineCore, EngineReady]:
    """Load everything. is_server: defaults for streams that people wait for, not for batches.

    Raises ConfigError or LoadError saying what does not fit.
    """
    folder = find_checkpoint(config.model, config.revision, config.download_dir)
    arch = read_arch(folder, config.hf_overrides, logger)
    if config.device == "null":
        return _build_null(config, arch, is_server)
    device = make_device(config)
    limits = resolve(config, arch, device.name, is_server=is_server)
    graph_sizes: tuple[int, ...] = ()
    mixed_rows = 0
    if device.name == "cuda" and not config.enforce_eager:
        graph_sizes = tuple(decode_sizes(limits.max_num_seqs))
        mixed_rows = mixed_sizes(arch, limits.max_num_batched_tokens, limits.max_num_seqs)[-1]
    room = _room(device)
    case = Case(
        config, limits, arch, device.name, room, _sizes_of(config, folder, arch, device), graph_sizes, mixed_rows,
        rounds=device.name == "cpu" and native.library() is not None,
    )  # fmt: skip
    check_fit(case)
    load = functools.partial(_load, config, limits, folder, arch, device)
    model = load()
    others_bytes = 0 if device.name == "cpu" else room.others_bytes
    n_pages, limits = size_pool(config, limits, arch, device, graph_sizes, mixed_rows, model.n_bytes, others_bytes)
    tokenizer = load_tokenizer(config, folder, arch)  # for its size: logits beyond it are padding
    n_tokens = None if tokenizer is None else len(tokenizer)
    make = functools.partial(_executor, limits, arch, device, config.block_size, n_pages, n_tokens, bool(graph_sizes))
    executor = make(model)
    min_shared = MIN_SHARED_TOKENS if device.name == "cuda" else 0
    pace = _pace(limits, arch, device.name, model.n_bytes / arch.n_parameters)
    structured = _structured_output(config, tokenizer, folder, arch, limits.max_num_seqs)
    if is_server:
        structured.start()
    core = _assemble(config, limits, executor, MonotonicClock(), n_pages, structured, min_shared, pace)
    if config.enable_sleep_mode:
        core.residence = Residence(model, load, make, device.release)
    return core, _ready(config, limits, arch, device.name, n_pages, model.n_bytes)


def _executor(
    limits: Limits,
    arch: ModelArch,
    device: Device,
    page_size: int,
    n_pages: int,
    vocab_limit: int | None,
    has_graphs: bool,
    model: Decoder,
) -> Executor:
    """Pages, tables, sampler and captured steps around a model, warmed up: all that sleep gives up but the weights."""
    pool = KVPool(arch, n_pages, page_size, KV_DTYPES[limits.kv_dtype], device)
    tables = SlotTables(limits.max_num_seqs, limits.max_model_len, page_size, device)
    sampler = Sampler(limits.max_num_seqs, arch.vocab_size, device.torch_device, vocab_limit=vocab_limit)
    if device.name == "cuda":
        with ticking("building kernels"):
            model.build_kernels(limits.max_num_batched_tokens)
    graphs = None
    if isinstance(device, cuda.CudaDevice) and has_graphs:
        graphs = StepGraphs(
            device, model, pool, tables, vocab_limit=sampler.vocab_limit,
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
        )  # fmt: skip
        with ticking("building kernels and capturing steps"):
            graphs.capture()
    tape = _tape(limits, device, model, pool, tables, sampler.vocab_limit) if device.name == "cpu" else None
    runner = Runner(device, model, pool, tables, sampler, graphs, tape)
    with ticking("building kernels and running a first step"):
        runner.warm_up(min(WARM_UP_TOKENS, limits.max_model_len - 1, limits.max_num_batched_tokens))
    return LaunchExecutor(runner) if device.name == "cuda" else ThreadExecutor(runner, runner.prepare)


def _room(device: Device) -> Room:
    """What there is before the engine takes anything."""
    if device.name != "cpu":
        return Room(device.total_bytes(), device.free_bytes())
    return Room(
        host.total_bytes(), host.free_bytes(), host.swap_bytes(), host.address_bytes(), own_bytes=host.resident_bytes()
    )


def _sizes_of(config: EngineConfig, folder: pathlib.Path, arch: ModelArch, device: Device) -> SizesOf:
    """Reads the headers of the checkpoint. Raises LoadError or ConfigError, as loading it would."""
    weights = Weights(folder, arch, device.name, config.load_format)
    return functools.cache(lambda dtype, quantization: weights.footprint(TORCH_DTYPES[dtype], quantization))


def _load(config: EngineConfig, limits: Limits, folder: pathlib.Path, arch: ModelArch, device: Device) -> Decoder:
    if config.quantization not in NOT_ROUNDED and native.library() is None:
        logger.warning("%s products run on a slow reference, not for use. %s", config.quantization, native.explain())
    start_s = time.perf_counter()
    model = load_model(
        folder,
        arch,
        dtype=TORCH_DTYPES[limits.dtype],
        device=device.torch_device,
        max_model_len=limits.max_model_len,
        load_format=config.load_format,
        seed=config.seed,
        quantization=config.quantization,
        check_finite=config.check_weights,
    )
    device.synchronize()
    took_s, size = time.perf_counter() - start_s, format_bytes(model.n_bytes)
    logger.info("weights: %.1f M parameters, %s in memory, in %.2f s", arch.n_parameters / 1e6, size, took_s)
    return model


def _tape(
    limits: Limits, device: Device, model: Decoder, pool: KVPool, tables: SlotTables, vocab_limit: int
) -> StepTape | None:
    """Steps as one native call, where the kernels for it are there."""
    reason = obstacle(model)
    if reason is not None:
        logger.warning("steps run operation by operation, bound by Python where the model is small: %s", reason)
        return None
    return StepTape(
        device, model, pool, tables, vocab_limit=vocab_limit,
        max_rows=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs,
    )  # fmt: skip


def _pace(limits: Limits, arch: ModelArch, device: str, weight_itemsize: float) -> Pace | None:
    """The bound on prompts beside decodes, if there is one. Any GPU counts as an H200: only the ratio of bandwidth and
    arithmetic matters, and that differs little."""
    if not limits.max_stall_factor:
        return None
    hardware = hardware_named("cpu" if device == "cpu" else "h200")
    return pace_for(arch, hardware, limits.max_stall_factor, weight_itemsize, kv_itemsize(limits, arch))


def _structured_output(
    config: EngineConfig, tokenizer: HfTokenizer | None, folder: pathlib.Path, arch: ModelArch, max_num_seqs: int
) -> StructuredOutput:
    if tokenizer is None:
        return StructuredOutput(None)
    settings = GrammarSettings(
        folder=str(text_folder(config, folder)),
        vocab_size=arch.vocab_size,
        end_token_ids=list(generation_defaults(config, folder, arch).eos_token_ids),
        n_words=-(-len(tokenizer) // MASK_WORD_BITS),
        n_rows=max_num_seqs,
        n_threads=n_mask_threads(),
        compile_s=config.structured_outputs_compile_seconds,
        compile_bytes=parse_bytes(config.structured_outputs_compile_memory),
    )
    return StructuredOutput(GrammarProcesses(settings))


def _build_null(config: EngineConfig, arch: ModelArch, is_server: bool) -> tuple[EngineCore, EngineReady]:
    """The whole engine without a model, on the virtual clock of an H200."""
    limits = resolve(config, arch, "null", is_server=is_server)
    n_pages = config.num_gpu_blocks_override or NULL_PAGES
    clock = VirtualClock()
    executor = NullExecutor(
        n_pages=n_pages,
        page_size=config.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        vocab_size=arch.vocab_size,
        clock=clock,
        cost=CostModel(arch=arch, hardware=hardware_named("h200")),
    )
    structured = StructuredOutput(None)  # what it says means nothing anyway
    pace = _pace(limits, arch, "null", 2)
    core = _assemble(config, limits, executor, clock, n_pages, structured, pace=pace)
    return core, _ready(config, limits, arch, "null", n_pages)


def _assemble(
    config: EngineConfig,
    limits: Limits,
    executor: Executor,
    clock: Clock,
    n_pages: int,
    grammars: StructuredOutput,
    min_shared_tokens: int = 0,
    pace: Pace | None = None,
) -> EngineCore:
    """The loop over an executor."""
    scheduler = Scheduler(
        SchedulerConfig(
            n_pages=n_pages,
            page_size=config.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching,
            pipeline_depth=config.pipeline_depth,
            min_shared_tokens=min_shared_tokens,
            max_num_waiting=config.max_num_waiting,
            pace=pace,
        ),
        clock,
    )
    return EngineCore(scheduler, executor, clock, config.pipeline_depth, grammars)


def _ready(
    config: EngineConfig, limits: Limits, arch: ModelArch, device: str, n_pages: int, weight_bytes: int = 0
) -> EngineReady:
    """What clients need to know."""
    weights = limits.dtype if config.quantization in NOT_ROUNDED else str(config.quantization)
    return EngineReady(
        max_model_len=limits.max_model_len,
        n_pages=n_pages,
        page_size=config.block_size,
        logits_width=arch.vocab_size,
        device=device,
        max_num_seqs=limits.max_num_seqs,
        model=ModelFacts(arch.family, arch.n_parameters, arch.hidden_size, weight_bytes, weights),
    )


def make_device(config: EngineConfig) -> Device:
    """The device that `config.device` means on this machine."""
    if config.device == "cuda" or (config.device == "auto" and cuda.is_available()):
        return cuda.CudaDevice()
    return CpuDevice(config.num_threads)
