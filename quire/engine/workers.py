"""A rank's worker from options: platform, limits, drafter and draft model are the same on every rank.

Owns the order in which they are made, and what of the options is refused meanwhile. Does not own memory for pages
(`engine/build`, and `engine/ranks/rank` for the other ranks).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib

import msgspec

from quire.compute.dist.comm import MeetingComm
from quire.compute.dist.context_groups import ContextGroups
from quire.compute.dist.data_parallel import DataParallel
from quire.compute.dist.expert_moves import open_ways
from quire.compute.dist.pipeline import Connect, Pipeline
from quire.compute.draft.choice import drafter_of
from quire.compute.draft.loaded import DraftSource
from quire.compute.draft.small import DraftCheckpoint
from quire.compute.draft.with_head import HeadCheckpoint
from quire.compute.expert_balancer import ExpertBalancer
from quire.compute.platform import Platform, platform_of
from quire.compute.weights.footprint import Footprint
from quire.compute.weights.hub import called, find_checkpoint
from quire.compute.worker import TORCH_DTYPES, Worker
from quire.config.arch import ModelArch
from quire.config.eagle import read_head, refuse_head
from quire.config.engine import EngineConfig
from quire.config.eplb import balanced
from quire.config.mesh import Mesh, depth_of, mesh_of, placed
from quire.config.model import read_arch
from quire.config.mtp import mtp_head
from quire.config.nodes import n_local_ranks
from quire.config.resolve import EngineLimits, resolve
from quire.config.speculative import SpeculativeConfig, read_speculative
from quire.core import host
from quire.core.errors import ConfigError
from quire.engine.capacity import ITEMSIZES, layout_of
from quire.engine.fit import FitCase
from quire.engine.progress import STEP_LIMIT_S
from quire.engine.ranks.done import DoneSteps
from quire.engine.ranks.group import RankGroup
from quire.engine.ranks.leader import LeadingWorker

logger = logging.getLogger("quire.engine")


Groups = Pipeline | DataParallel | ContextGroups


class Meeting:
    """All groups of one rank."""

    def __init__(
        self, comm: MeetingComm, groups: Groups | None, worker: Worker, *, moves_experts: bool = False
    ) -> None:
        """comm: of all ranks; groups: beside it, None: there are no others; worker: of this rank."""
        self.comm, self.groups, self._worker, self._moves_experts = comm, groups, worker, moves_experts

    def join(self) -> None:
        """Returns when all ranks can speak to one another. RuntimeError if they are not there in time."""
        for one in self._met:
            one.join()
        if self._moves_experts:
            open_ways(self.comm, self._worker.platform.device.torch_device)

    def abort(self) -> None:
        """Another rank is gone: end what waits for it, in whatever thread. What was to come of it is void."""
        for one in self._met:
            one.abort()

    def close(self) -> None:
        """Leave all groups, when the worker is closed: its captured steps hold calls of theirs. The other ranks do the
        same, or it was aborted."""
        for one in reversed(self._met):
            one.close()

    @property
    def _met(self) -> list[MeetingComm | Groups]:
        """In an order in which all ranks can meet."""
        return [self.comm] if self.groups is None else [self.comm, self.groups]

    @property
    def n_calls(self) -> int:
        """That this rank has begun within its stage, or to exchange rows: one that hangs is behind the others there.
        Where it is alone, layers."""
        groups = self.groups
        if isinstance(groups, ContextGroups):
            return groups.n_calls
        if groups is None or (isinstance(groups, DataParallel) and groups.exchange is not None):
            return self.comm.n_calls
        return self._worker.n_begun if groups.sharing is None else groups.sharing.n_calls


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A worker, not loaded, and what it was made of."""

    worker: Worker
    limits: EngineLimits
    draft: DraftSource | None
    meeting: Meeting | None
    """With the other ranks; None: it is the only one."""


def fit_case(config: EngineConfig, made: Made) -> FitCase:
    """What is to fit a rank's device, by what it has free before anything is loaded."""
    worker = made.worker
    platform, captured = worker.platform, worker.captured()
    sizes_of = worker.footprint if made.draft is None else functools.cache(functools.partial(_with_draft, made))
    return FitCase(
        config, made.limits, worker.arch, worker.room, sizes_of, captured.graph_sizes, captured.mixed_rows,
        rounds=platform.rounds, kv_rounded="" if worker.arch.keeps_lines else platform.kv_rounded,
        draft_numbers=None if made.draft is None else made.draft.numbers,
    )  # fmt: skip


def _with_draft(made: Made, dtype: str, quantization: str) -> Footprint:
    """As `Worker.footprint`, with the weights that guess, which are read behind the model's."""
    found, held_bytes = made.worker.footprint(dtype, quantization), 0
    if made.draft is not None:
        held_bytes = made.draft.weights_bytes(made.worker.weights, TORCH_DTYPES[dtype], quantization)
    held_bytes += found.held_bytes
    return Footprint(held_bytes, max(found.peak_bytes, held_bytes), max(found.address_bytes, held_bytes))


def make_leader(
    config: EngineConfig, folder: pathlib.Path, arch: ModelArch, group: RankGroup | None, *, is_server: bool
) -> Made:
    """The worker of rank 0. group: the other ranks, None: there are none. Raises ConfigError or LoadError."""
    if group is None:
        return make_worker(config, folder, arch, is_server=is_server)
    made = make_worker(config, folder, arch, is_server=is_server, meeting_point=group.meeting_point, kind=LeadingWorker)
    assert isinstance(made.worker, LeadingWorker) and made.meeting is not None
    device = made.worker.platform.device
    made.worker.group, made.worker.meeting = group, made.meeting
    group.calls, group.abandon = made.meeting, made.meeting.abort
    made.worker.done = group.done = DoneSteps(device.mark)
    group.allow_steps(config.engine_stall_timeout or STEP_LIMIT_S[made.worker.platform.name])
    device.checks.append(functools.partial(_check_in_wait, group))
    device.is_watched = True
    return made


def _check_in_wait(group: RankGroup) -> None:
    """Asked again and again where rank 0 waits for its device: then the engine's loop tells nobody of a late rank."""
    group.check()
    if group.is_late and group.on_late is not None:
        group.on_late()


def make_worker(
    config: EngineConfig,
    folder: pathlib.Path,
    arch: ModelArch,
    *,
    is_server: bool,
    rank: int = 0,
    meeting_point: str = "",
    kind: type[Worker] = Worker,
) -> Made:
    """rank: of those that meet at meeting_point, see `core/meeting`. Raises ConfigError or LoadError; takes no
    memory."""
    shape, whole = mesh_of(config), arch
    n_ranks, arch = shape.n_ranks, placed(arch, config, shape.dp_rank_of(rank))
    n_local = n_local_ranks(config, n_ranks)
    platform = platform_of(_with_threads(config, n_local), rank % n_local)
    comm, pipeline = _groups(config, platform, rank, meeting_point)
    if config.deterministic and platform.no_determinism:
        raise ConfigError(
            f"deterministic = True cannot be promised: {platform.no_determinism}; leave --deterministic out",
            param="deterministic",
        )
    limits = resolve(config, arch, platform.name, is_server=is_server, on_hopper=platform.on_hopper)
    if limits.kv_dtype == "fp8" and platform.kv_rounded != "fp8":
        raise ConfigError(
            f"kv_cache_dtype = {config.kv_cache_dtype!r} needs a GPU that converts to e4m3, of compute capability 8.9 "
            f"or later, and this is a {platform.device_name}: leave --kv-cache-dtype out",
            param="kv_cache_dtype",
        )
    data = None
    if comm is not None and shape.dp > 1:
        sizes = limits.max_num_seqs, limits.max_num_batched_tokens
        data = DataParallel(shape, rank, *sizes, comm, _share(platform, shape, rank), meeting_point)
    context = None
    if comm is not None and shape.n_token_ranks > 1:
        context = ContextGroups(comm, shape.sp, platform.group, meeting_point)
    speculative = read_speculative(config.speculative_config)
    if speculative is not None and arch.state_specs:
        raise ConfigError(
            f"speculative_config: {arch.family} has recurrent layers, whose states a rejected draft would stay in: "
            "leave --speculative-config out",
            param="speculative_config",
        )
    drafter = None if speculative is None else drafter_of(speculative)
    if speculative is not None and drafter is None and shape.n_token_ranks > 1:
        raise ConfigError(
            f"speculative_config: method {speculative.method!r} has weights, which ranks that share tokens"
            f" (prefill_context_parallel_size = {shape.n_token_ranks}) do not take: take 'ngram' or 'suffix', or"
            " --tensor-parallel-size, or leave --speculative-config out",
            param="speculative_config",
        )
    draft = None if speculative is None else _draft_source(config, speculative, folder, whole, shape.tp)
    if draft is not None and rank == 0:  # it says for all what it says
        draft.check(arch, layout_of(config, limits, arch), limits.max_model_len)
    worker = kind(
        config, limits, folder, arch, platform, comm, drafter=drafter, draft=draft, pipeline=pipeline, data=data,
        context=context,
    )  # fmt: skip
    if comm is None:
        return Made(worker, limits, draft, None)
    meeting = Meeting(comm, pipeline or data or context, worker, moves_experts=config.enable_eplb)
    return Made(worker, limits, draft, meeting)


def make_balancer(config: EngineConfig, made: Made) -> ExpertBalancer | None:
    """What moves experts of a loaded worker; None where they stay. Raises ConfigError where they cannot move."""
    eplb, meeting = balanced(config), made.meeting
    if eplb is None or meeting is None:
        return None
    limits, arch = made.limits, made.worker.arch
    row_bytes = arch.hidden_size * ITEMSIZES[limits.dtype]  # of the normed input, which a step has at least
    return ExpertBalancer(made.worker, meeting.comm, eplb, limits.max_num_batched_tokens * row_bytes)


def _groups(
    config: EngineConfig, platform: Platform, rank: int, meeting_point: str
) -> tuple[MeetingComm | None, Pipeline | None]:
    """Of all ranks, and of a stage; None where there is but one. Sums go through those that share layers."""
    shape = mesh_of(config)
    if shape.n_ranks == 1:
        return None, None
    n_local = n_local_ranks(config, shape.n_ranks)
    platform.check_ranks(rank % n_local, n_local)
    if shape.n_ranks == shape.n_stage_ranks:
        return platform.sharing(rank, shape.n_ranks, meeting_point), None
    pipeline = None
    if shape.pp > 1:
        share = _share(platform, shape, rank)
        pipeline = Pipeline(shape, rank, platform.group, share, meeting_point, depth_of(config))
    return platform.group(rank, shape.n_ranks, meeting_point), pipeline


def _share(platform: Platform, shape: Mesh, rank: int) -> Connect:
    """How a rank meets those that share its layers."""
    return functools.partial(platform.sharing, first=rank - shape.place_in_stage(rank))


def _with_threads(config: EngineConfig, n_ranks: int) -> EngineConfig:
    """Ranks of one host share its cores."""
    if n_ranks == 1 or config.num_threads:
        return config
    return msgspec.structs.replace(config, num_threads=max(1, host.n_cores() // n_ranks))


def _draft_source(
    config: EngineConfig, speculative: SpeculativeConfig, folder: pathlib.Path, arch: ModelArch, n_ranks: int
) -> DraftSource | None:
    """folder: the checkpoint of the model, which is `arch`, not placed; n_ranks: that share each layer."""
    if speculative.model:
        folder = find_checkpoint(speculative.model, "", config.download_dir)
    if speculative.method == "eagle3":
        return HeadCheckpoint(folder, read_head(folder), speculative.tree, n_ranks)
    if speculative.model:
        refuse_head(folder, called(str(folder)))
        try:
            arch = read_arch(folder, {}, logger)
        except ConfigError as error:
            name = called(str(folder))
            raise ConfigError(f"{name}, which is to draft: {error.message}", param="speculative_config") from None
    if speculative.method == "mtp":
        name, still = called(speculative.model or config.model), {"enable_eplb": False, "eplb_config": {}}
        arch = placed(arch, msgspec.structs.replace(config, **still))  # its experts stay where they are
        return HeadCheckpoint(folder, mtp_head(folder, arch, logger, name), speculative.tree, n_ranks)
    return DraftCheckpoint(folder, arch, n_ranks) if speculative.model else None
