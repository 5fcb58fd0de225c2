"""What FLOPs of training cost in hours of a device, and the reverse. Peaks are those of `accelerators`."""

from __future__ import annotations

from typing import Final

from quire.core.errors import ConfigError
from quire.planner.accelerators import Accelerator

HOUR_S: Final = 3600.0
DAY_S: Final = 86400.0
PRODUCTS: Final = "bfloat16"
"""What training computes in."""


def peak_flops(gpu: Accelerator) -> float:
    """A second, of dense products. ConfigError for a device that has no such products."""
    if PRODUCTS not in gpu.flops_per_s:
        raise ConfigError(f"--gpu {gpu.name} has no {PRODUCTS} products, in which training is planned")
    return gpu.flops_per_s[PRODUCTS]


def device_hours(flops: float, gpu: Accelerator, utilisation: float) -> float:
    """Of one device that reaches this part of its peak."""
    return flops / (peak_flops(gpu) * utilisation) / HOUR_S


def flops_of_hours(hours: float, gpu: Accelerator, utilisation: float) -> float:
    """The inverse."""
    return hours * HOUR_S * peak_flops(gpu) * utilisation
