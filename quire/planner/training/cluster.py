"""Accelerators as training sees them: peak, memory, links. From data sheets; nothing here is measured by us.

Owns the table for training and what FLOPs cost in hours and dollars. Does not own measured ceilings (`hardware`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean

GIB: Final = 2**30
HOUR_S: Final = 3600.0
DAY_S: Final = 86400.0


class Accelerator(msgspec.Struct, frozen=True):
    """One device of a cluster."""

    name: str
    flops_per_s: float
    """Dense bfloat16 products, multiply and add counted as two; float16 where it has no bfloat16."""
    memory_bytes: float
    link_bytes_per_s: float
    """To its neighbours in a machine, each way."""
    network_bytes_per_s: float
    """To other machines, each way: a port of its own."""
    n_linked: int = 8
    """Devices of a machine."""


ACCELERATORS: Final = {
    one.name: one
    for one in (
        Accelerator("v100", 125e12, 32 * GIB, 150e9, 12.5e9),
        Accelerator("a100", 312e12, 80 * GIB, 300e9, 25e9),
        Accelerator("h100", 989.4e12, 80 * GIB, 450e9, 50e9),
        Accelerator("h200", 989.4e12, 141e9, 450e9, 50e9),
        Accelerator("b200", 2250e12, 180e9, 900e9, 50e9),
        Accelerator("mi300x", 1307e12, 192e9, 448e9, 50e9),
    )
}


def accelerator_named(name: str) -> Accelerator:
    """ConfigError with the known names for another."""
    if name not in ACCELERATORS:
        near = did_you_mean(name, ACCELERATORS)
        raise ConfigError(f"--gpu {shown(name)} is unknown{near}; there are {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]


def device_hours(flops: float, gpu: Accelerator, utilisation: float) -> float:
    """Of one device that reaches this part of its peak."""
    return flops / (gpu.flops_per_s * utilisation) / HOUR_S


def flops_of_hours(hours: float, gpu: Accelerator, utilisation: float) -> float:
    """The inverse."""
    return hours * HOUR_S * gpu.flops_per_s * utilisation
