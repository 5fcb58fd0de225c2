"""Which implementation of attention runs a plan: the catalogue's choice, remembered for inputs that are alike.

Owns what of a plan and a variant the choice depends on. Invariant: plans and parameters are not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from quire.kernels import selector
from quire.kernels.attention.schedule.plan import AttnPlan
from quire.kernels.attention.variant import Variant

Run = Callable[..., None]
"""`run(q, k, v, plan, variant, out, lse)` of an implementation."""


def choose(plan: AttnPlan, variant: Variant, device: torch.device, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> Run:
    """What `op.run` runs. Raises ConfigError when no implementation can run this."""
    needs = tuple(getattr(plan.work, name, 0) for name in ("small_rows", "n_small", "n_large", "n_merges"))
    key = (plan.layout, plan.heads, plan.page_size, needs[0], *map(bool, needs[1:]), variant.program)
    uncached = _Uncached(plan, variant)
    chosen = _choose(key, device, q_dtype, kv_dtype, uncached)
    del uncached.plan, uncached.variant  # the cache keeps its arguments, and these hold memory of the device
    return chosen


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
    device: torch.device,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    uncached: _Uncached,
) -> Run:
    listed = selector.candidates("attention", "run", device, q_dtype)
    return selector.first(listed, uncached.plan, uncached.variant, q_dtype, kv_dtype)
