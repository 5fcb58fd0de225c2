"""Which implementation of attention runs, and why the others do not. Owns the order of preference and nothing else.

Invariants: on CUDA nothing falls back to the torch reference; on CPU it does. Where the best cannot run, a warning says
what runs instead, and why, once for each reason. Plans and parameters are not kept.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

from quire.core.errors import ConfigError
from quire.kernels.attention.schedule.plan import AttnPlan
from quire.kernels.attention.variant import Variant

logger = logging.getLogger("quire.kernels")

PREFERENCE = {"cuda": ("hopper", "triton"), "cpu": ("cpu", "reference")}
"""Device type → implementations, best first."""


def module(name: str) -> ModuleType:
    """An implementation: `obstacle(plan, variant, q_dtype, kv_dtype)` and `run(q, k, v, plan, variant, out, lse)`."""
    place = name if name == "reference" else f"{name}.launcher"
    return importlib.import_module(f"quire.kernels.attention.{place}")


def choose(
    plan: AttnPlan, variant: Variant, device_type: str, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> ModuleType:
    """The implementation that `run` uses. Raises ConfigError when none can."""
    needs = tuple(getattr(plan.work, name, 0) for name in ("small_rows", "n_small", "n_large", "n_merges"))
    key = (plan.layout, plan.heads, plan.page_size, needs[0], *map(bool, needs[1:]), variant.program)
    uncached = _Uncached(plan, variant)
    chosen = _choose(key, device_type, q_dtype, kv_dtype, uncached)
    del uncached.plan, uncached.variant  # the cache keeps its arguments, and these hold memory of the device
    return chosen


def obstacles(
    plan: AttnPlan, variant: Variant, device_type: str, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> dict[str, str | None]:
    """Implementation → why it cannot run this, or None if it can, in order of preference."""
    return {name: module(name).obstacle(plan, variant, q_dtype, kv_dtype) for name in PREFERENCE.get(device_type, ())}


class _Uncached:
    """An argument of a cached function that does not count: the rest of the key says all that matters of it."""

    def __init__(self, plan: AttnPlan, variant: Variant) -> None:
        self.plan = plan
        self.variant = variant

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Uncached)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=512)
def _choose(
    key: object,
    device_type: str,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    uncached: _Uncached,
) -> ModuleType:
    found = obstacles(uncached.plan, uncached.variant, device_type, q_dtype, kv_dtype)
    name = next((name for name, obstacle in found.items() if obstacle is None), None)
    if name is None:
        reasons = "; ".join(f"{name}: {obstacle}" for name, obstacle in found.items())
        raise ConfigError(f"no implementation of attention can run this on {device_type!r}: {reasons}")
    best = next(iter(found))
    if name != best:
        _warn(best, name, found[best])
    return module(name)


@functools.cache
def _warn(best: str, name: str, obstacle: str | None) -> None:
    logger.warning("attention: %r runs instead of the faster %r (%s)", name, best, obstacle)
