"""An NVIDIA GPU as a device. The only file outside kernel launchers that says `torch.cuda`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.core import env
from quire.core.errors import ConfigError
from quire.kernels import transfer

logger = logging.getLogger("quire.engine")


class _Arriving:
    def __init__(
        self,
        tensors: list[torch.Tensor],
        event: torch.cuda.Event,
        checks: Sequence[Callable[[], None]],
        *,
        is_watched: bool = False,
    ) -> None:
        self._tensors = tensors
        self._event = event
        self._checks = checks
        self._is_watched = is_watched

    def wait(self) -> list[torch.Tensor]:
        """The interpreter is free meanwhile, but where checks have to be asked."""
        while self._is_watched and not self._event.query():  # type: ignore[no-untyped-call]
            self._check()
            time.sleep(0)  # other threads may have the interpreter
        self._event.synchronize()
        self._check()
        return self._tensors

    def _check(self) -> None:
        for check in self._checks:
            check()


N_HOST_SIDES = 4
"""Steps whose uploads may be under way at once, and one that is being written."""


class Staging:
    """Device memory at fixed addresses and its host sides: sections of both, and one copy for all that a step writes.

    Invariant: a host side is not given out again before its copy has run.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self._device = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(N_HOST_SIDES)]
        self._copied = [torch.cuda.Event() for _ in range(N_HOST_SIDES)]  # type: ignore[no-untyped-call]
        self._taken = 0
        self._used = 0
        self.turn = 0

    def section(self, shape: tuple[int, ...], dtype: torch.dtype) -> Section:
        """The next part of the memory. Sections are sent up to the end of the last one filled."""
        start = self._taken
        n_bytes = math.prod(shape) * dtype.itemsize
        if start + n_bytes > len(self._device):
            raise ValueError(f"{start + n_bytes} bytes of sections do not fit the {len(self._device)} of this staging")
        self._taken = -(-(start + n_bytes) // 64) * 64
        return self._view(start, shape, dtype)

    def rest(self, dtype: torch.dtype, after: int = 0) -> Section:
        """What no section has taken yet, but for its first `after` numbers, as one that takes nothing: sections of the
        rest may overlap. No other section can follow."""
        start = self._taken + -(-after * dtype.itemsize // 64) * 64
        return self._view(start, ((len(self._device) - start) // dtype.itemsize,), dtype)

    def _view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Section:
        n_bytes = math.prod(shape) * dtype.itemsize
        views = [part[start : start + n_bytes].view(dtype).view(shape) for part in (self._device, *self._hosts)]
        return Section(self, start, views[0], [view.numpy() for view in views[1:]])

    def begin(self) -> None:
        """Turn to a host side that may be written; sections' `host` changes."""
        self.turn = (self.turn + 1) % N_HOST_SIDES
        self._copied[self.turn].synchronize()
        self._used = 0

    def include(self, end: int) -> None:
        """Bytes up to `end` are to be sent."""
        self._used = max(self._used, end)

    def send(self) -> None:
        """Copy to the device, in stream order, without a wait."""
        self._device[: self._used].copy_(self._hosts[self.turn][: self._used], non_blocking=True)
        self._copied[self.turn].record()


@dataclasses.dataclass(slots=True)
class Section:
    """A part of a `Staging`: its address on the device is fixed, its host side is this turn's."""

    _staging: Staging
    _start: int
    device: torch.Tensor
    _hosts: list[np.ndarray]

    @property
    def host(self) -> np.ndarray:
        """Like `device`, to be written between `begin` and `send`."""
        return self._hosts[self._staging.turn]

    def filled(self, n: int) -> None:
        """The first n elements were written."""
        self._staging.include(self._start + n * self.device.itemsize)


class CudaDevice:
    """`Device` on one GPU and its current stream; copies go through pinned memory."""

    is_host = False

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device = 'cuda' but torch sees no CUDA device: see `quire doctor`, or use --device cpu")
        # Triton reads it when it compiles its first kernel, which is after this.
        env.set_for_children("TRITON_CACHE_DIR", str(env.cache_folder() / "triton"))
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.checks: list[Callable[[], None]] = []
        self.is_watched = False
        self._pinned: list[np.ndarray] = []
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def free_bytes(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def release(self) -> None:
        """Ends all graphs: whoever still holds one keeps its memory, and a group of NCCL for as long as that lasts.

        cuBLAS keeps 33 MiB for each stream that multiplied, those of captured graphs in the graphs' memory: it lets go
        of them here, and may only while no graph lives."""
        gc.collect()
        for graph in tuple(self._graphs):
            graph.reset()
        self._graphs.clear()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return transfer.upload(array, self.torch_device)

    def pin(self, memory: np.ndarray) -> None:
        """Where the driver refuses, memory is sent from as any other."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if status:
            logger.warning("memory of masks cannot be pinned (error %d): they are copied twice", status)
            with contextlib.suppress(RuntimeError):  # what is launched next would raise that error
                self.zeros((1,), torch.uint8)
            return
        self._pinned.append(memory)
        weakref.finalize(self, _unpin, memory).atexit = False

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        if any(np.may_share_memory(array, memory) for memory in self._pinned):
            target.copy_(torch.from_numpy(array), non_blocking=True)
        else:
            target.copy_(self.upload(array))

    def staging(self, n_bytes: int) -> Staging:
        """Memory for what a captured step reads from the host."""
        return Staging(n_bytes, self.torch_device)

    def download(self, tensors: list[torch.Tensor]) -> _Arriving:
        targets = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for target, source in zip(targets, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Arriving(targets, event, self.checks, is_watched=self.is_watched)

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """Replays of what `launches` queues, on fixed addresses. It runs once before, so that kernels are compiled."""
        launches()
        if not self._graphs:  # a pool ends with its last graph: after sleep the one before is no more
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads may wait for results meanwhile
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            launches()
        self._graphs.add(graph)
        return graph.replay

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.query

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def _unpin(memory: np.ndarray) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]


def is_available() -> bool:
    """True if torch sees at least one CUDA device."""
    return torch.cuda.is_available()


def n_devices() -> int:
    """That torch sees."""
    return torch.cuda.device_count()


def name_of(index: int) -> str:
    """As the driver calls it; empty: there is none."""
    return str(torch.cuda.get_device_name(index)) if is_available() else ""


def describe() -> list[str]:
    """One line for each visible GPU: name, memory, compute capability."""
    lines = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        lines.append(
            f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs"
        )
    return lines
