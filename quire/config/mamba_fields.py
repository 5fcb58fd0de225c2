"""Reading a model's config.json: the keys of Mamba-2, under the names that families have for them.

Owns what such a key means. Does not own which names a family has (`families`).
"""

from __future__ import annotations

from typing import Any, Final

from quire.config.arch import MAX_HEAD_DIM, MAX_HEADS
from quire.config.mamba import MambaSpec
from quire.config.model_fields import ModelFields

MAX_KERNEL: Final = 64
MAX_STATE: Final = 1024
MAX_STEP: Final = 1e6


def mamba(
    config: ModelFields,
    *,
    heads: str,
    head_dim: str,
    groups: str,
    state: str,
    kernel: str,
    expand: str,
    bias: str,
    conv_bias: str,
    defaults: tuple[int, int, int],
    size: int | None = None,
    **more: Any,
) -> MambaSpec:
    """The mixer, whose keys have these names. defaults: of heads, groups and state. size: of
    head_dim; None: what the heads divide the columns into. more: fields of `MambaSpec`.
    Raises ConfigError."""
    n_heads = config.integer(heads, 1, MAX_HEADS, defaults[0])
    inner_size = config.integer(expand, 1, 64, 2) * config.hidden_size
    if config.values.get(head_dim) == "auto":
        config = config.with_values(**{head_dim: inner_size // n_heads})
    size = config.integer(head_dim, 1, MAX_HEAD_DIM, inner_size // n_heads if size is None else size)
    if n_heads * size != inner_size:
        raise config.error(heads, f"{expand} x hidden_size = {inner_size} over {head_dim} = {size}")
    n_groups = config.integer(groups, 1, n_heads, defaults[1], bound=heads)
    if n_heads % n_groups:
        raise config.error(groups, f"a divisor of {heads} = {n_heads}")
    low, high = _limits(config)
    return MambaSpec(
        n_scan_heads=n_heads, head_dim=size, n_groups=n_groups, kernel=config.integer(kernel, 2, MAX_KERNEL, 4),
        state_size=config.integer(state, 1, MAX_STATE, defaults[2]), bias=config.flag(bias, False),
        conv_bias=config.flag(conv_bias, True), dt_min=low, dt_max=high, **more,
    )  # fmt: skip


def _limits(config: ModelFields) -> tuple[float, float]:
    """time_step_limit; infinity is a word in files of transformers."""
    limits = config.values.get("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    if isinstance(limits, list) and len(limits) == 2:
        found = [one.get("__float__") if isinstance(one, dict) else one for one in limits]
        low, high = (float("inf") if one == "Infinity" else one for one in found)
        if isinstance(low, int | float) and isinstance(high, int | float) and 0 <= low <= min(high, MAX_STEP):
            return float(low), float(high)
    raise config.error("time_step_limit", "two numbers, the first at least 0 and not above the second")
