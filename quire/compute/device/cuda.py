"""An NVIDIA GPU as a device. The only file outside kernel launchers that says `torch.cuda`."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from quire.core import env
from quire.core.errors import ConfigError
from quire.kernels import transfer


class _Arriving:
    def __init__(self, tensors: list[torch.Tensor], event: torch.cuda.Event) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> list[torch.Tensor]:
        self._event.synchronize()
        return self._tensors


class CudaDevice:
    """`Device` on one GPU and its current stream; copies go through pinned memory."""

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device = 'cuda' but torch sees no CUDA device: see `quire doctor`, or use --device cpu")
        # Triton reads it when it compiles its first kernel, which is after this.
        env.set_for_children("TRITON_CACHE_DIR", str(env.cache_folder() / "triton"))
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._graph_pool = torch.cuda.graph_pool_handle()

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def free_bytes(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return transfer.upload(array, self.torch_device)

    def download(self, tensors: list[torch.Tensor]) -> _Arriving:
        targets = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for target, source in zip(targets, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Arriving(targets, event)

    def capture(self, forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """A graph of `forward` on fixed addresses: (replay, its output). Kernels are compiled and warmed up first."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            output = forward()
        return graph.replay, output

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def is_available() -> bool:
    """True if torch sees at least one CUDA device."""
    return torch.cuda.is_available()


def describe() -> list[str]:
    """One line for each visible GPU: name, memory, compute capability."""
    lines = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        lines.append(
            f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs"
        )
    return lines
