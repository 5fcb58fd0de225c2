"""The host as a device: tensors share memory with numpy, work is done when the call returns."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import numpy as np
import torch

from quire.core import host


class _Arrived:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[torch.Tensor]:
        return self._tensors


def _is_done() -> bool:
    return True


def _nothing() -> None:
    """There is nothing to wait for."""


class CpuDevice:
    """`Device` on the host's cores."""

    torch_device = torch.device("cpu")
    is_host = True

    def __init__(self, n_threads: int = 0) -> None:
        self.checks: list[Callable[[], None]] = []
        """Nobody calls them while a step runs: a call that waits for another rank raises once that is gone."""
        self.is_watched = False
        if n_threads:
            torch.set_num_threads(n_threads)

    def total_bytes(self) -> int:
        return host.total_bytes()

    def free_bytes(self) -> int:
        return min(host.free_bytes(), host.address_bytes())

    def release(self) -> None:
        gc.collect()
        host.trim_heap()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if 0 in shape:
            return torch.zeros(shape, dtype=dtype)
        # numpy asks for zeroed memory, which is mapped lazily; torch would write it all: 20 s for a pool of 6 GiB.
        flat = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        return flat.view(dtype).view(shape)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def pin(self, memory: np.ndarray) -> None:
        """All memory is the host's."""

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        target.copy_(torch.from_numpy(array.copy()))

    def download(self, tensors: list[torch.Tensor]) -> _Arrived:
        return _Arrived(tensors)

    def mark(self) -> Callable[[], bool]:
        return _is_done

    def beside(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        return _nothing

    def synchronize(self) -> None:
        """Nothing is ever pending."""
