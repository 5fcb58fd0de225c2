"""Host arrays to the device without a wait: through pinned memory, in stream order."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` on `device`. The pinned block returns to torch's cache once the copy has run."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array) if device.type == "cpu" else _pinned(array).to(device, non_blocking=True)


def write(array: np.ndarray, target: torch.Tensor) -> None:
    """Overwrite the first elements of a flat device tensor of the same type, whose address stays."""
    array = np.ascontiguousarray(array).reshape(-1)
    source = torch.from_numpy(array) if target.device.type == "cpu" else _pinned(array)
    target[: len(source)].copy_(source, non_blocking=True)


def _pinned(array: np.ndarray) -> torch.Tensor:
    """A copy. numpy's hands: torch would wake all its threads for a large one, and warn of one that is read-only."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    copy = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    np.copyto(copy.numpy(), array)
    return copy
