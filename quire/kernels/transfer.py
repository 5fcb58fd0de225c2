"""Host arrays to the device without a wait: through pinned memory, in stream order."""

from __future__ import annotations

import functools

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on `device`: on a CPU its own memory, if that is contiguous and may be written, else a copy. A pinned
    block returns to torch's cache once it has been copied."""
    array = np.ascontiguousarray(array)
    return _shared(array) if device.type == "cpu" else _pinned(array).to(device, non_blocking=True)


def write(array: np.ndarray, target: torch.Tensor) -> None:
    """Overwrite the first elements of a flat device tensor of the same type, whose address stays."""
    array = np.ascontiguousarray(array).reshape(-1)
    source = _shared(array) if target.device.type == "cpu" else _pinned(array)
    target[: len(source)].copy_(source, non_blocking=True)


def _shared(array: np.ndarray) -> torch.Tensor:
    """Torch has no tensors that may not be written, and warns of such arrays."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _pinned(array: np.ndarray) -> torch.Tensor:
    """A copy, made by numpy: torch would wake all its threads for a large one."""
    copy = torch.empty(array.shape, dtype=_dtype(array.dtype), pin_memory=True)
    np.copyto(copy.numpy(), array)
    return copy


@functools.cache
def _dtype(dtype: np.dtype) -> torch.dtype:
    """Torch's name of it."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
