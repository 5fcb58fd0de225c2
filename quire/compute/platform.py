"""`Platform`: all that depends on the kind of device, chosen once: memory, kernels, forward strategies, captured sizes.

Owns the choice and its consequences. Does not own the device's operations (`device`) nor the strategies (`forward`).
Invariant: outside of this file and of kernels, nobody in compute or the engine asks what a device is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Protocol

from quire.compute.device import cuda
from quire.compute.device.cpu import CpuDevice
from quire.compute.device.device import Device
from quire.compute.dist.comm import MeetingComm
from quire.compute.dist.gloo import GlooComm
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.peers import PeerComm
from quire.compute.forward.asked import rows_alone_on_cpu
from quire.compute.forward.buckets import MOST_VERIFYING, mixed_sizes
from quire.compute.forward.eager import EagerForward
from quire.compute.forward.fused import FusedForward
from quire.compute.forward.graphs import GraphForward
from quire.compute.forward.obstacle import obstacle
from quire.compute.forward.strategy import CommonForward, Follower, Forward
from quire.compute.models.decoder import Decoder
from quire.compute.models.sent_rows import exchange_of
from quire.compute.runner.pool import KVPool
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.resolve import MIN_SHARED_TOKENS, EngineLimits
from quire.core import host
from quire.core.errors import ConfigError
from quire.core.ticker import ticking
from quire.kernels import native
from quire.kernels.hopper import converts_to_e4m3, machine_obstacle
from quire.kernels.invariance import RowsAlone, rows_alone
from quire.planner.captured import decode_sizes
from quire.planner.memory import Room

logger = logging.getLogger("quire.engine")


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """Steps that will be captured, as `MemoryEquation` counts them."""

    graph_sizes: tuple[int, ...] = ()
    mixed_rows: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Forwards:
    """Ways to compute a step."""

    in_turn: list[Forward]
    """The first that takes a step runs it; the last takes all."""
    ahead: FusedForward | None = None
    """One of them, if steps can be made ready before their turn."""
    follower: Follower | None = None
    """One of them, if its steps may begin where only the device knows."""
    common: CommonForward | None = None
    """One of them, if data-parallel ranks send each other rows in its steps."""


class Platform(Protocol):
    """One kind of device, and one device of it."""

    name: str
    """'cpu' or 'cuda': for options, logs and clients."""
    device: Device
    device_name: str
    """As its driver calls it; empty: the host's cores."""
    computes_alone: bool
    """Launching returns before the work is done; else the host's own threads do it."""
    capturing: cuda.CudaDevice | None
    """`device`, where steps are captured on it."""
    min_shared_tokens: int
    """Shortest common prefix that attention reads once for several sequences; 0: it never does."""
    rounds: bool
    """Weights can be rounded here, and products of them are fast."""
    on_hopper: bool
    """See `EngineLimits.on_hopper`."""
    kv_rounded: str
    """The fastest `kv_cache_dtype` to which keys and values can be rounded here."""
    no_determinism: str
    """Why a request's bits may depend on its company (docs/determinism.md); empty: they do not."""
    rows_alone: RowsAlone
    """Of any model; NEVER: its kernels are so in any case, or see `rows_alone_of`."""

    def rows_alone_of(self, arch: ModelArch) -> RowsAlone:
        """Of a model, whole. Else than NEVER: a token's bits tell whether it was launched so, and a prompt from an
        output."""
        ...

    def check_ranks(self, rank: int, n_ranks: int) -> None:
        """Raises ConfigError where there are too few devices of this kind for so many ranks, of which this is one."""
        ...

    def group(self, rank: int, size: int, meeting_point: str) -> MeetingComm:
        """How ranks speak, of which this one is number `rank`."""
        ...

    def sharing(self, rank: int, size: int, meeting_point: str, first: int = 0) -> MeetingComm:
        """How those speak that share every layer, whose sums are short and many. first: see `PeerComm`."""
        ...

    def room(self) -> Room:
        """Its memory now."""
        ...

    def captured(self, arch: ModelArch, limits: EngineLimits) -> Captured:
        """What `forwards` will capture."""
        ...

    def forwards(self, model: Decoder, pool: KVPool, tables: SlotTables, tail: Tail, limits: EngineLimits) -> Forwards:
        """The strategies for a loaded model, its kernels built."""
        ...


class CpuPlatform:
    """The host's cores: a step is one native call where it can be."""

    name, device_name = "cpu", ""
    computes_alone, min_shared_tokens, kv_rounded, rows_alone = False, MIN_SHARED_TOKENS["cpu"], "int8", RowsAlone.NEVER
    capturing: cuda.CudaDevice | None = None
    on_hopper = False

    def __init__(self, n_threads: int = 0, rank: int = 0, *, deterministic: bool = False) -> None:
        """rank: the first speaks for all. deterministic: every request asks."""
        self.device: Device = CpuDevice(n_threads)
        self._rank, self._deterministic = rank, deterministic
        self.rounds = native.library() is not None
        self.no_determinism = "" if self.rounds else f"sums of torch depend on the batch here, and {native.explain()}"

    def rows_alone_of(self, arch: ModelArch) -> RowsAlone:
        """Few models have two kinds of kernels."""
        return rows_alone_on_cpu(arch, deterministic=self._deterministic)

    def check_ranks(self, rank: int, n_ranks: int) -> None:
        """The cores are shared among the ranks."""
        if n_ranks > host.n_cores() and rank == 0:
            logger.warning("%d ranks share %d cores: they wait for one another", n_ranks, host.n_cores())

    def group(self, rank: int, size: int, meeting_point: str) -> MeetingComm:
        """Over the loopback interface, or between machines."""
        return GlooComm(rank, size, meeting_point)

    def sharing(self, rank: int, size: int, meeting_point: str, first: int = 0) -> MeetingComm:
        """As any."""
        return self.group(rank, size, meeting_point)

    def room(self) -> Room:
        """Main memory, and the bounds on this process."""
        return Room(
            host.total_bytes(), host.free_bytes(), swap_bytes=host.swap_bytes(), address_bytes=host.address_bytes(),
            own_bytes=host.resident_bytes(),
        )  # fmt: skip

    def captured(self, arch: ModelArch, limits: EngineLimits) -> Captured:
        """Nothing."""
        return Captured()

    def forwards(self, model: Decoder, pool: KVPool, tables: SlotTables, tail: Tail, limits: EngineLimits) -> Forwards:
        """One native call where the kernels for it are there, else kernel by kernel."""
        eager, reason = EagerForward(self.device, model, pool, tables, limits.max_num_batched_tokens), obstacle(model)
        if pool.across is not None:
            reason = "its attention is divided among ranks, which wait for each other within every layer"
        if reason is not None:
            is_divided = model.n_ranks > 1 or not model.is_whole or pool.across is not None
            if self._rank == 0 and is_divided and native.library() is not None:  # somebody has asked for that
                logger.info("steps of this model run operation by operation: %s", reason)
            elif self._rank == 0:
                logger.warning(
                    "steps of this model run operation by operation, called from Python, and not in one native call: "
                    "a small model is slower that way; its answers are the same. The reason: %s", reason,
                )  # fmt: skip
            return Forwards([eager])
        fused = FusedForward(
            self.device, model, pool, tables, tail,
            max_rows=limits.max_num_batched_tokens, max_sampled=limits.max_sampled,
        )  # fmt: skip
        return Forwards([fused, eager], ahead=fused)


class CudaPlatform:
    """One NVIDIA GPU: small steps are captured."""

    name = "cuda"
    computes_alone = True
    rounds = True
    no_determinism = ""

    def __init__(self, *, captures: bool = True, deterministic: bool = False, index: int = 0) -> None:
        """Raises ConfigError where there is none."""
        device = cuda.CudaDevice(index)
        self.device: Device = device
        self.device_name = cuda.name_of(index)
        self.on_hopper = machine_obstacle() is None
        self.kv_rounded = "fp8" if converts_to_e4m3(device.torch_device) else "int8"
        self.capturing = device if captures else None
        self.rows_alone = RowsAlone.ALWAYS if deterministic else RowsAlone.ASKED
        self.min_shared_tokens = 0 if deterministic else MIN_SHARED_TOKENS["cuda"]

    def rows_alone_of(self, arch: ModelArch) -> RowsAlone:
        """Of every model."""
        return self.rows_alone

    def check_ranks(self, rank: int, n_ranks: int) -> None:
        """One GPU a rank."""
        if n_ranks > cuda.n_devices():
            raise ConfigError(
                f"{n_ranks} ranks on this machine need {n_ranks} GPUs, one a rank, and {cuda.n_devices()} are visible:"
                " lower tensor_parallel_size, pipeline_parallel_size, data_parallel_size or"
                " prefill_context_parallel_size, or make more visible (CUDA_VISIBLE_DEVICES)",
                param="tensor_parallel_size",
            )

    def group(self, rank: int, size: int, meeting_point: str) -> MeetingComm:
        """Through NCCL."""
        return NcclComm(rank, size, meeting_point, self.device.torch_device)

    def sharing(self, rank: int, size: int, meeting_point: str, first: int = 0) -> MeetingComm:
        """Through memory that the GPUs share, and NCCL."""
        comm = PeerComm(self.group(rank, size, meeting_point), self.device.torch_device, first=first)
        self.device.checks.append(comm.check)
        return comm

    def room(self) -> Room:
        """The GPU's own memory."""
        return Room(self.device.total_bytes(), self.device.free_bytes(), is_main=False)

    def captured(self, arch: ModelArch, limits: EngineLimits) -> Captured:
        """Decode steps by sequences, and the largest of the others."""
        if self.capturing is None:
            return Captured()
        largest = 0 if arch.state_specs else limits.max_num_batched_tokens
        mixed = mixed_sizes(arch, largest, limits.max_num_seqs) if largest else [0]
        verifying = decode_sizes(min(limits.max_sampled, MOST_VERIFYING)) if limits.max_drafts else []
        return Captured((*decode_sizes(limits.max_num_seqs), *verifying), mixed[-1])

    def forwards(self, model: Decoder, pool: KVPool, tables: SlotTables, tail: Tail, limits: EngineLimits) -> Forwards:
        """Captured steps, then kernel by kernel."""
        if self.rows_alone is RowsAlone.ASKED:
            with rows_alone(), ticking("building kernels"):
                model.build_kernels(limits.max_num_batched_tokens)
        with rows_alone() if self.rows_alone is RowsAlone.ALWAYS else contextlib.nullcontext():
            return self._forwards(model, pool, tables, tail, limits)

    def _forwards(self, model: Decoder, pool: KVPool, tables: SlotTables, tail: Tail, limits: EngineLimits) -> Forwards:
        with ticking("building kernels"):
            model.build_kernels(limits.max_num_batched_tokens)
        eager = EagerForward(self.device, model, pool, tables, limits.max_num_batched_tokens)
        if self.capturing is None:
            return Forwards([eager])
        graphs = GraphForward(
            self.capturing, model, pool, tables, tail,
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
            max_sampled=limits.max_sampled, verifies=limits.max_drafts > 0,
        )  # fmt: skip
        with ticking("building kernels and capturing steps"):
            graphs.capture()
        return Forwards([graphs, eager], follower=graphs, common=None if exchange_of(model) is None else graphs)


def platform_of(config: EngineConfig, rank: int = 0) -> Platform:
    """The platform that `config.device`, which is not 'null', means on this machine, for one of its ranks."""
    if config.device == "cuda" or (config.device == "auto" and cuda.is_available()):
        index = min(rank, max(0, cuda.n_devices() - 1))  # of more ranks `comm` says what is wrong
        return CudaPlatform(captures=not config.enforce_eager, deterministic=config.deterministic, index=index)
    return CpuPlatform(config.num_threads, rank, deterministic=config.deterministic)
