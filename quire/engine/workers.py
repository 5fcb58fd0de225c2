"""A rank's worker from options: platform, limits, drafter and draft model are the same on every rank.

Owns the order in which they are made, and what of the options is refused meanwhile. Does not own memory for pages
(`engine/build`, and `engine/ranks/rank` for the other ranks).
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib

import msgspec

from quire.compute.dist.comm import MeetingComm
from quire.compute.dist.context_groups import ContextGroups
from quire.compute.dist.pipeline import Pipeline
from quire.compute.draft.choice import drafter_of
from quire.compute.draft.loaded import DraftSource
from quire.compute.draft.small import DraftCheckpoint
from quire.compute.draft.with_head import HeadCheckpoint
from quire.compute.platform import platform_of
from quire.compute.weights.hub import find_checkpoint
from quire.compute.worker import Worker, not_deterministic
from quire.config.arch import ModelArch
from quire.config.context import n_dividing_heads
from quire.config.eagle import read_head
from quire.config.engine import EngineConfig
from quire.config.mesh import mesh_shape, placed
from quire.config.model import read_arch
from quire.config.mtp import mtp_head
from quire.config.resolve import EngineLimits, resolve
from quire.config.speculative import SpeculativeConfig, read_speculative
from quire.core import host
from quire.core.errors import ConfigError
from quire.engine.capacity import layout_of
from quire.engine.ranks.done import DoneSteps
from quire.engine.ranks.group import RankGroup
from quire.engine.ranks.leader import LeadingWorker

logger = logging.getLogger("quire.engine")


class Meeting:
    """All groups of one rank."""

    def __init__(
        self, comm: MeetingComm, pipeline: Pipeline | None, worker: Worker, groups: ContextGroups | None = None
    ) -> None:
        """comm: of all ranks; pipeline: None: there is one stage; worker: of this rank; groups: of shared tokens."""
        self.comm, self.pipeline, self._worker, self._groups = comm, pipeline, worker, groups

    def join(self) -> None:
        """Returns when all ranks can speak to one another. RuntimeError if they are not there in time."""
        self.comm.join()
        for one in (self.pipeline, self._groups):
            if one is not None:
                one.join()

    @property
    def n_calls(self) -> int:
        """That this rank has begun within its stage: one that hangs is behind the others there. Where it is alone,
        layers."""
        if self._groups is not None:
            return self._groups.n_calls
        sharing = self.comm if self.pipeline is None else self.pipeline.sharing
        return self._worker.n_begun if sharing is None else sharing.n_calls


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A worker, not loaded, and what it was made of."""

    worker: Worker
    limits: EngineLimits
    draft: DraftSource | None
    meeting: Meeting | None
    """With the other ranks; None: it is the only one."""


def make_leader(
    config: EngineConfig, folder: pathlib.Path, arch: ModelArch, group: RankGroup | None, *, is_server: bool
) -> Made:
    """The worker of rank 0. group: the other ranks, None: there are none. Raises ConfigError or LoadError."""
    if group is None:
        return make_worker(config, folder, arch, is_server=is_server)
    made = make_worker(config, folder, arch, is_server=is_server, meeting_point=group.meeting_point, kind=LeadingWorker)
    assert isinstance(made.worker, LeadingWorker) and made.meeting is not None
    made.worker.group, made.worker.meet, group.calls = group, made.meeting.join, made.meeting
    made.worker.done = group.done = DoneSteps(made.worker.platform.device.mark)
    return made


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
    """rank: of those that meet at meeting_point, a file that is not there. Raises ConfigError or LoadError; takes no
    memory."""
    shape, arch = mesh_shape(config), placed(arch, config)
    n_ranks = shape.n_ranks
    platform = platform_of(_with_threads(config, n_ranks), rank)
    comm = None if n_ranks == 1 else platform.comm(rank, n_ranks, meeting_point)
    pipeline = None if shape.pipeline == 1 else Pipeline(shape, rank, platform.group, meeting_point)
    no_determinism = platform.no_determinism or not_deterministic(config)
    if config.deterministic and no_determinism:
        raise ConfigError(
            f"deterministic = True cannot be promised: {no_determinism}; or leave --deterministic out",
            param="deterministic",
        )
    limits = resolve(config, arch, platform.name, is_server=is_server)
    speculative = read_speculative(config.speculative_config)
    if speculative is not None and arch.state_specs:
        raise ConfigError(
            f"speculative_config: {arch.family} has recurrent layers, whose states a rejected draft would stay in: "
            "leave --speculative-config out",
            param="speculative_config",
        )
    if speculative is not None and shape.pipeline > 1:
        raise ConfigError(
            f"speculative_config: a stage of a pipeline would wait for the last one to know which drafts count, so"
            f" pipeline_parallel_size = {shape.pipeline} takes none: leave --speculative-config out, or take"
            " --tensor-parallel-size",
            param="speculative_config",
        )
    drafter = None if speculative is None else drafter_of(speculative)
    draft = None if speculative is None else _draft_source(config, speculative, folder, arch)
    if draft is not None and speculative is not None and n_ranks > 1:
        raise ConfigError(
            f"speculative_config: method {speculative.method!r} has weights, which {n_ranks} ranks have not been tried"
            " with: take 'ngram' or 'suffix', or leave --speculative-config out",
            param="speculative_config",
        )
    if draft is not None:
        draft.check(arch, layout_of(config, limits, arch), limits.max_model_len)
    groups = None
    if comm is not None and shape.context > 1:
        groups = ContextGroups(comm, n_dividing_heads(config), platform.group, meeting_point)
    worker = kind(
        config, limits, folder, arch, platform, comm, drafter=drafter, draft=draft, pipeline=pipeline, groups=groups
    )
    return Made(worker, limits, draft, None if comm is None else Meeting(comm, pipeline, worker, groups))


def _with_threads(config: EngineConfig, n_ranks: int) -> EngineConfig:
    """Ranks of one host share its cores."""
    if n_ranks == 1 or config.num_threads:
        return config
    return msgspec.structs.replace(config, num_threads=max(1, host.n_cores() // n_ranks))


def _draft_source(
    config: EngineConfig, speculative: SpeculativeConfig, folder: pathlib.Path, arch: ModelArch
) -> DraftSource | None:
    """folder: the checkpoint of the model, which is `arch`."""
    if speculative.model:
        folder = find_checkpoint(speculative.model, "", config.download_dir)
    if speculative.method == "mtp":
        head = mtp_head(folder, read_arch(folder) if speculative.model else arch, logger)
        return HeadCheckpoint(folder, head, speculative.tree)
    if speculative.method == "eagle3":
        return HeadCheckpoint(folder, read_head(folder), speculative.tree)
    if not speculative.model:
        return None
    return DraftCheckpoint(folder, read_arch(folder, {}, logger))
