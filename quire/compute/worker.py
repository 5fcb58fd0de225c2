"""`Worker`: one rank of a model. It loads weights, takes memory for pages, and runs plans.

Owns the life of a rank: loaded, allocated, running, asleep. Does not own what a plan says (`control`), how many pages
there are (`engine/capacity`), when plans come (`engine/executors`) nor how ranks find one another (`dist`).
Invariants: asleep, nothing of the pages is held, nor at level 2 of the weights; what is bound to addresses (captured
graphs, native calls) is made anew at waking; two workers of one process share nothing but their process.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Final

import msgspec
import torch

from quire.compute.adapters.host import HostAdapters
from quire.compute.dist.comm import Comm, Reduction, SoloComm
from quire.compute.dist.context_groups import ContextGroups
from quire.compute.dist.data_parallel import DataParallel
from quire.compute.dist.pipeline import Pipeline
from quire.compute.draft.drafter import Drafter, QueuingDrafter
from quire.compute.draft.loaded import DraftSource, LoadedDraft
from quire.compute.draft.timing import measure
from quire.compute.facts import StageFacts, WorkerFacts, of_stages
from quire.compute.forward.across import forwards_of
from quire.compute.forward.alone import obstacle
from quire.compute.forward.fused import ReadyStep
from quire.compute.models.decoder import Decoder, no_entry
from quire.compute.platform import Captured, Platform
from quire.compute.runner.branching import Branching
from quire.compute.runner.data_parallel import DataParallelRunner
from quire.compute.runner.lengths import SlotLengths
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import Launched, Runner
from quire.compute.runner.staged import Entry, StageRunner, tail_of
from quire.compute.runner.states import StatePool
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.warm_up import of_every_alignment, warm_up
from quire.compute.sample.sampler import Sampler
from quire.compute.weights.footprint import Footprint, Weights
from quire.compute.weights.kv_scales import read_kv_scales
from quire.compute.weights.loader import load_model
from quire.config.arch import ModelArch
from quire.config.context import attending, deals_tokens, page_tokens
from quire.config.division import not_deterministic
from quire.config.engine import EngineConfig
from quire.config.kv import KVLayout
from quire.config.nodes import n_local_ranks
from quire.config.resolve import NOT_ROUNDED, EngineLimits
from quire.config.shares import share_arch
from quire.config.speculative import read_speculative
from quire.config.stages import LayerRange, layer_range, stage_arch, stage_layout
from quire.core.errors import ConfigError, EngineError
from quire.core.plan import OnDrafts, StepMasks, StepPlan
from quire.core.result import StepResult
from quire.core.ticker import ticking
from quire.core.units import format_bytes
from quire.kernels import native
from quire.kernels.attention import trees
from quire.kernels.invariance import RowsAlone
from quire.planner.drafts import DraftCosts

logger = logging.getLogger("quire.engine")

WARM_UP_TOKENS: Final = 512
TORCH_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES: Final = TORCH_DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """What a worker takes memory for, besides its weights."""

    n_pages: int
    """The dummy page counted in."""
    max_model_len: int
    """Of one sequence; at most that of the rotary tables."""
    vocab_limit: int | None = None
    """Token ids that exist; None: as many as the logits are wide."""
    layout: KVLayout | None = None
    """Groups of layers of `Worker.arch` with page tables of their own; None: one group that keeps everything."""
    n_snapshots: int = 0
    """Recurrent states that are kept beside those of the slots."""
    max_num_seqs: int = 0
    """Slots; 0: as many as the limits say."""


class Worker:
    """Made of plain values, a platform and a comm; every rank of a model gets the same values."""

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        folder: pathlib.Path,
        arch: ModelArch,
        platform: Platform,
        comm: Comm | None = None,
        drafter: Drafter | None = None,
        draft: DraftSource | None = None,
        pipeline: Pipeline | None = None,
        data: DataParallel | None = None,
        context: ContextGroups | None = None,
    ) -> None:
        """folder: a checkpoint of `arch`, the whole model; comm: of all ranks, None for the only one. drafter: who
        guesses; draft: or weights that do, divided as the model is; neither where nothing is drafted. pipeline: this
        rank's stage, None: there is one, and its ranks are all of `comm`; data: its place among data-parallel ranks,
        None: there are none; context: its groups where ranks share tokens. Takes no memory. ConfigError: the ranks
        cannot share the model."""
        self._config, self._limits, self._folder, self._arch = config, limits, folder, arch
        self.platform = platform
        self.comm: Comm = SoloComm() if comm is None else comm
        self._pipeline, self.data, self._context = pipeline, data, context
        groups = pipeline or data or context
        self._sharing: Comm = self.comm if groups is None else groups.sharing or SoloComm()
        """Of the ranks that share each layer."""
        stage, n_stages = (0, 1) if pipeline is None else (pipeline.stage, pipeline.n_stages)
        self._layers: Final = layer_range(arch, stage, n_stages, config.pp_layer_partition)
        shared = share_arch(arch, self._sharing.rank, self._sharing.size)
        self.shared: Final = attending(shared, config, self.comm.rank)
        """Its part of all layers: the groups of pages follow from it."""
        self.arch: Final = stage_arch(self.shared, self._layers)
        """What this rank computes and keeps of the model: of these layers those of its stage."""
        self._drafter, self._draft = drafter, draft
        self._small: LoadedDraft | None = None
        """Of `draft`."""
        self.room: Final = platform.room().of_one(n_local_ranks(config, self.comm.size))
        """What there was before this worker took anything."""
        self._footprints: dict[tuple[str, str], Footprint] = {}
        self.no_determinism = platform.no_determinism or not_deterministic(config)
        """Why a request's bits may depend on its company, known once pages are allocated; empty: those of one that asks
        for it do not."""
        self.rows_alone: Final = platform.rows_alone_of(arch)
        """Which steps are launched in a region of `kernels/invariance`."""
        self.adapters: Final = HostAdapters(config, platform.device)
        self._model: Decoder | None = None
        self._allocation: Allocation | None = None
        self._runner: Runner | None = None

    def captured(self, limits: EngineLimits | None = None) -> Captured:
        """The steps that `allocate` will capture within these limits; None: those that it was made with."""
        if deals_tokens(self._config):
            return Captured()
        captured = self.platform.captured(self.arch, limits or self._limits)
        if self._config.enable_lora:  # each is captured with and without adapters
            captured = dataclasses.replace(captured, graph_sizes=captured.graph_sizes * 2)
        if self._draft is None or not captured.graph_sizes:
            return captured
        sizes = (*captured.graph_sizes, *self._draft.captured(self._limits))
        return dataclasses.replace(captured, graph_sizes=sizes)

    @functools.cached_property
    def weights(self) -> Weights:
        device, load_format = self.platform.device.torch_device, self._config.load_format
        return Weights(self._folder, self._arch, device, load_format, self._sharing, self._layers)

    def footprint(self, dtype: str, quantization: str) -> Footprint:
        """Bytes of weights in a dtype and under a value of --quantization, from a checkpoint's headers, and of places.

        Raises LoadError or ConfigError, as loading it would.
        """
        key = dtype, quantization
        if key not in self._footprints:
            found = self.weights.footprint(TORCH_DTYPES[dtype], quantization)
            n_bytes = self.adapters.places_bytes(self._arch, TORCH_DTYPES[dtype], self._sharing, self._layers)
            self._footprints[key] = dataclasses.replace(
                found, held_bytes=found.held_bytes + n_bytes, peak_bytes=found.peak_bytes + n_bytes
            )
        return self._footprints[key]

    def load(self) -> WorkerFacts:
        """Read the weights. Raises LoadError or ConfigError."""
        self._model = model = self._load(self._folder, self._arch, self._sharing, self._layers)
        places_bytes = self.adapters.attach(model, TORCH_DTYPES[self._limits.dtype])
        weights_bytes = model.n_bytes + places_bytes
        if self._draft is not None:
            load = functools.partial(self._load, comm=self._sharing)
            self._small = self._draft.load(load, self._model, self.platform, self._sharing)
            weights_bytes += self._small.n_bytes
        room = self.platform.room().of_one(n_local_ranks(self._config, self.comm.size))
        others_bytes = 0 if self.room.is_main else self.room.used_bytes
        stage, n_stages = (0, 1) if self._pipeline is None else (self._pipeline.stage, self._pipeline.n_stages)
        stages = of_stages(StageFacts(weights_bytes, others_bytes, room, places_bytes), stage, n_stages, self.comm)
        return WorkerFacts(
            n_ranks=self.comm.size,
            device=self.platform.name,
            dtype=self._limits.dtype,
            weights_bytes=max(one.weights_bytes for one in stages),
            others_bytes=max(one.others_bytes for one in stages),
            room=min((one.room for one in stages), key=lambda one: one.free_bytes),
            stages=stages,
        )

    def allocate(self, allocation: Allocation) -> None:
        """Pages, tables, sampler and forward strategies around the loaded model, warmed up: then plans can come."""
        self._allocation = allocation
        self._runner = self._make_runner(self.model, allocation)

    def draft_costs(self) -> DraftCosts | None:
        """Of steps and drafts, measured now, a fraction of a second; None where nothing is drafted."""
        drafter, speculative = self._drafter, read_speculative(self._config.speculative_config)
        if drafter is None or speculative is None:
            return None
        limits, allocation = self._limits, self._allocation
        assert allocation is not None
        return measure(
            self.runner, drafter, speculative.n_drafts, limits.max_num_seqs, allocation.max_model_len,
            branches=speculative.tree is not None, of_all=self._slowest,
        )  # fmt: skip

    def _slowest(self, seconds: float) -> float:
        """Of all ranks."""
        return float(self.comm.all_reduce(torch.tensor([seconds]), Reduction.MAX))

    @property
    def drafter(self) -> Drafter | None:
        """Who guesses, once pages are allocated."""
        return self._drafter

    @property
    def guesses_all(self) -> bool:
        """Whether who guesses makes as many guesses as it is asked for, on the device."""
        return isinstance(self._drafter, QueuingDrafter)

    def replace_drafter(self, drafter: Drafter, chance: float) -> None:
        """Another one, before the first request, for a benchmark: see `Runner.replace_drafter`."""
        self._drafter = drafter
        self.runner.replace_drafter(drafter, chance)

    def launch(self, plan: StepPlan, on_drafts: OnDrafts | None = None) -> Launched:
        """Queue one step on the device; plans come in order. on_drafts: see `Runner.launch`."""
        return self.runner.launch(plan, on_drafts)

    def stage(self, plan: StepPlan) -> Callable[[], Launched] | None:
        """Do what can be done of a launch before the step before it has its masks, see `Runner.stage`."""
        return self.runner.stage(plan)

    def prepare(self, plan: StepPlan) -> ReadyStep | None:
        """Make a step ready before its turn, see `Runner.prepare`; None if it is to be launched in its turn."""
        return self.runner.prepare(plan)

    def run(self, plan: StepPlan, masks: StepMasks | None = None) -> StepResult:
        """One step from beginning to end. masks: of a plan with `masked` spans."""
        launched = self.runner.launch(plan)
        if masks is not None:
            launched.mask(masks)
        return launched.result()

    def sleep(self, level: int) -> None:
        """Give memory up: pages and all around them, and the weights to the host (1) or altogether (2).

        Nobody else may hold anything of the last steps, and every rank does it. Deeper sleep may follow on level 1.
        """
        if self._runner is not None:
            self._runner.take_all()
        self._release(level)

    def _release(self, level: int) -> None:
        self._runner = None
        if self._model is not None and not self._layers.is_first:
            self._model.enter = no_entry
        if self._draft is not None:
            self._drafter = None  # it has pages
        models: list[Decoder | LoadedDraft] = [one for one in (self._model, self._small) if one is not None]
        if level != 1:
            self._model = self._small = None
            self.adapters.detach()
        else:
            for model in models:
                model.leave_device()
        del models
        self.platform.device.release()

    def wake(self) -> None:
        """Take memory again. If that fails, `sleep` is to be called again: a part may be held."""
        if self._model is None:
            self.load()
        else:
            self._model.enter_device()
            if self._small is not None:
                self._small.enter_device()
        if self._allocation is not None:
            self._runner = self._make_runner(self.model, self._allocation)

    def close(self) -> None:
        """Give up all memory, for good; other ranks may be gone."""
        self._release(2)

    def expert_loads(self) -> list[list[int]]:
        """See `Decoder`; empty without experts, and without weights."""
        return [] if self._model is None else self._model.expert_loads()

    @property
    def n_begun(self) -> int:
        """See `Decoder`; 0 without weights."""
        return 0 if self._model is None else self._model.n_begun

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are somewhere."""
        return self._model is not None

    @property
    def model(self) -> Decoder:
        """With its weights; EngineError before `load` and after `sleep(2)`."""
        if self._model is None:
            raise EngineError("the weights are not loaded")
        return self._model

    @property
    def runner(self) -> Runner:
        """EngineError before `allocate` and while the worker sleeps."""
        if self._runner is None:
            raise EngineError("no memory for steps is allocated")
        return self._runner

    def _load(self, folder: pathlib.Path, arch: ModelArch, comm: Comm, layers: LayerRange | None = None) -> Decoder:
        config = self._config
        if self.platform.name == "cpu" and config.quantization not in NOT_ROUNDED and native.library() is None:
            reason = native.explain()
            native.logger.warning("%s products run on a slow reference, not for use. %s", config.quantization, reason)
        start_s = time.perf_counter()
        model = load_model(
            folder, arch, dtype=TORCH_DTYPES[self._limits.dtype], device=self.platform.device.torch_device,
            max_model_len=self._limits.max_model_len, load_format=config.load_format, seed=config.seed,
            quantization=config.quantization, check_finite=config.check_weights, comm=comm, layers=layers,
        )  # fmt: skip
        if self._limits.kv_dtype == "fp8" and config.load_format != "dummy":
            model.kv_scales = read_kv_scales(folder, arch.family, model.range)
        self.platform.device.synchronize()
        took_s, size = time.perf_counter() - start_s, format_bytes(model.n_bytes)
        part, n = "" if model.n_ranks == 1 and model.is_whole else "its part of ", arch.n_parameters / 1e6
        logger.info("weights: %s%.1f M parameters, %s in memory, in %.2f s", part, n, size, took_s)
        return model

    def _make_runner(self, model: Decoder, allocation: Allocation) -> Runner:
        device, page_size = self.platform.device, self._config.block_size
        own, n_seqs = self._limits, allocation.max_num_seqs or self._limits.max_num_seqs
        limits = msgspec.structs.replace(own, max_model_len=allocation.max_model_len, max_num_seqs=n_seqs)
        layout = None if allocation.layout is None else stage_layout(allocation.layout, self._layers)
        pool = KVPool(self.shared, allocation.n_pages, page_size, KV_DTYPES[limits.kv_dtype], device, layout)
        pool.scales = model.kv_scales
        if self.arch.state_specs:
            dtype = TORCH_DTYPES[limits.dtype]
            pool.states = StatePool(self.arch, limits.max_num_seqs, allocation.n_snapshots, dtype, device)
        if self.platform.rows_alone is not RowsAlone.NEVER:
            self.no_determinism = self.no_determinism or obstacle(model, pool)
        if self.no_determinism and self._config.deterministic:
            raise ConfigError(
                f"deterministic = True cannot be promised: {self.no_determinism}; leave --deterministic out"
            )
        if self._small is not None:
            self._small.attach(pool, limits.max_num_batched_tokens)
        n_groups = len(pool.layout.groups)
        n_tokens = page_tokens(self._config)
        pool.n_ranks = n_tokens // page_size
        tables = SlotTables(limits.max_num_seqs, limits.max_model_len, n_tokens, device, n_groups)
        sampler = Sampler(
            limits.max_num_seqs, self.arch.vocab_size, device.torch_device, vocab_limit=allocation.vocab_limit
        )
        tail = tail_of(self._pipeline)(device, model, tables, sampler)
        entry = None
        if not self._layers.is_first:
            shape = limits.max_num_batched_tokens, self.arch.hidden_size
            entry = model.enter = Entry(device.zeros(shape, model.stream_dtype))
        exchange = None if self.data is None else self.data.exchange
        forwards = forwards_of(self.platform, model, pool, tables, tail, limits, self._context, exchange)
        if self._small is not None:
            self._drafter = self._small.drafter(tables, pool, limits, allocation.vocab_limit)
        variants = [layer.mixer.variant for layer in model.layers]
        may_branch = not any(one is None or trees.obstacle(one, device.torch_device) for one in variants)
        branching = Branching(pool, tables, tail) if may_branch else None
        lengths = None if self._drafter is None else SlotLengths(tables, self._drafter, branching)
        alone = self.rows_alone
        put = None if model.adapters is None else self.adapters.put
        in_turn, ahead = forwards.in_turn, forwards.ahead
        if self._pipeline is not None:
            runner: Runner = StageRunner(pool, tables, tail, in_turn, self._pipeline, entry, alone=alone, put=put)
        elif self.data is not None:
            ranks, common = (self.data, model), forwards.common
            runner = DataParallelRunner(pool, tables, tail, in_turn, ahead, *ranks, common, alone=alone, put=put)
        else:
            runner = Runner(pool, tables, tail, in_turn, ahead, lengths, forwards.follower, alone=alone, put=put)
        with ticking("building kernels and running a first step"):
            most = max(1, min(limits.max_model_len - 1, limits.max_num_batched_tokens))
            warm_up(runner, min(WARM_UP_TOKENS, most), () if device.is_host else of_every_alignment(most))
        return runner
