"""The `Device` protocol: the few things that differ between a CPU and a GPU, outside kernels.

Owns memory figures, uploads, downloads and completion. Does not own what runs (kernels dispatch on the tensor).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch


class Download(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[torch.Tensor]:
        """Block until they arrived; CPU tensors in the order given."""
        ...


class Device(Protocol):
    """One place where tensors live and kernels run, in order."""

    torch_device: torch.device
    is_host: bool
    """Its tensors lie in the host's memory: what numpy writes to them is there."""
    checks: list[Callable[[], None]]
    """Raise where what was computed is void, or will not come; called before the host sees it."""
    is_watched: bool
    """Somebody beside learns when what is queued will never come, and a check says so: also to be called in waits."""

    def total_bytes(self) -> int:
        """Size of its memory."""
        ...

    def free_bytes(self) -> int:
        """Memory that nobody uses now."""
        ...

    def release(self) -> None:
        """Give back what is kept for later work, and what died: runners and what they recorded know each other."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory; on a host its pages are taken when they are first written."""
        ...

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Copy to the device without waiting; the array may be changed at once afterwards."""
        ...

    def pin(self, memory: np.ndarray) -> None:
        """Memory that is sent from often, and has its place for good: `send` needs no copy of it on the host."""
        ...

    def send(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Copy to `target` on the device without waiting. A part of pinned memory must not change until it is there."""
        ...

    def download(self, tensors: list[torch.Tensor]) -> Download:
        """Start copying to the host after all work queued so far."""
        ...

    def mark(self) -> Callable[[], bool]:
        """Whether all that is queued by now is done: to be asked later, by any thread, without a wait."""
        ...

    def beside(self, launch: Callable[[], None]) -> Callable[[], None]:
        """What `launch` queues, behind all that is queued by now and all that went this way before, runs beside what
        is queued from now on; nothing of both may meet. Returned: what is queued after that call waits for it."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        ...
