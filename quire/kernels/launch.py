"""How kernels of a device may be launched."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Kernels may be launched before the one before has ended (programmatic dependent launch), then wait for it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
