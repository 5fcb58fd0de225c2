"""The rotary position embedding a config.json asks for: `Rope`, and its parser for old and new spellings.

Owns names, defaults (those of transformers) and limits; does not own the cos/sin tables (`compute/layers/rotary.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from quire.config.fields import Fields

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DIVIDED: Final = "divided"
"""Type of a GGUF file that carries what each frequency is divided by; no config.json can ask for it."""
MAX_POSITIONS: Final = 2**27
DEFAULT_THETA: Final = 10_000.0

_KNOWN: Final = (
    *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"),
    *("attention_factor", "mscale", "mscale_all_dim", "finetuned", "short_factor", "long_factor"),
    *("short_mscale", "long_mscale"),
)
MAX_DIVISORS: Final = 256


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the rotary embedding. Fields after `factor` matter only to the types they name."""

    theta: float
    """Base period."""
    type: str = "default"
    """One of `ROPE_TYPES`, or `DIVIDED`."""
    partial: float = 1.0
    """Share of a head's dimensions that is rotated: the first `rotary_dim`."""
    interleaved: bool = False
    """Neighbours are pairs in the checkpoint; the loader makes them halves, as all kernels want them."""
    factor: float = 1.0
    """Context extension (linear, dynamic, llama3, yarn)."""
    original_max_position: int
    """Context before extension, in tokens (dynamic, llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn."""
    beta_slow: float = 1.0
    """yarn."""
    truncate: bool = True
    """yarn: round the correction range to whole dimensions."""
    attention_factor: float = 1.0
    """yarn, longrope: factor on cos and sin."""
    softmax_factor: float = 1.0
    """yarn of DeepSeek: factor on the scale of q·k, which only its families apply."""
    divisors: tuple[float, ...] = ()
    """divided, and longrope within the original context: one for each of the rotary_dim / 2 frequencies."""
    long_divisors: tuple[float, ...] = ()
    """longrope: beyond the original context."""
    long_attention_factor: float = 0.0
    """longrope: as attention_factor, beyond it; 0: the same (Phi-3.5-MoE)."""

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated; even."""
        return int(head_dim * self.partial)

    def words(self, head_dim: int) -> str:
        """What it is, for people."""
        factor = f" by {self.factor:g}" if self.factor != 1 else ""
        rotary_dim = self.rotary_dim(head_dim)
        share = f", {rotary_dim} of {head_dim} dimensions" if rotary_dim != head_dim else ""
        return f"rope of theta {self.theta:,g}, type {self.type}{factor}{share}"


def parse_rope(
    config: Fields,
    max_position: int,
    *,
    inside: str = "",
    theta: float = DEFAULT_THETA,
    theta_key: str = "rope_theta",
    partial: float = 1.0,
    partial_key: str = "partial_rotary_factor",
    interleaved: bool = False,
    scaled: bool = True,
    original: int = 0,
    types: tuple[str, ...] = ROPE_TYPES,
    other_types: Mapping[str, str] | None = None,
) -> Rope:
    """`Rope` from a config.json: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before).

    inside: the kind of layer whose parameters are wanted, where there are several objects in one. theta, partial:
    defaults of their keys. scaled: False where `rope_scaling` is for other layers. original: default of the context
    before extension; 0: max_position. types: those allowed. other_types: their other names → type. As in transformers,
    a non-empty `rope_scaling` wins over `rope_parameters`, and a theta inside over one outside. ConfigError names the
    field.
    """
    fields = config.nested("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    if inside and inside in fields:
        fields = fields.nested(inside)
    elif not scaled:
        fields = Fields({}, config.where)
    _refuse_unknown(fields)
    if original:
        fields = Fields({"original_max_position_embeddings": original, **fields.values}, fields.where)
    outer_theta = config.number(theta_key, 2.0, 1e15, theta)
    outer_partial = config.number(partial_key, 0.0, 1.0, partial)
    found_theta = fields.number("rope_theta", 2.0, 1e15, outer_theta)
    others = other_types or {}
    name = fields.choice("rope_type", (*types, *others), fields.choice("type", (*types, *others), "default"))
    kind = others.get(name, name)
    return Rope(
        theta=found_theta,
        type=kind,
        partial=fields.number("partial_rotary_factor", 0.0, 1.0, outer_partial),
        interleaved=interleaved,
        **_PARSERS[kind](config, fields, max_position),
    )


def _refuse_unknown(fields: Fields) -> None:
    for name in fields.values:
        if name not in _KNOWN:
            raise fields.error(name, f"absent: rotary parameters may be {', '.join(_KNOWN)}")


def _default(config: Fields, fields: Fields, max_position: int) -> dict[str, Any]:
    return {"original_max_position": max_position}


def _factor(config: Fields, fields: Fields, max_position: int) -> dict[str, Any]:
    return {"factor": fields.number("factor", 1.0, 1e4), "original_max_position": max_position}


def _original(config: Fields, fields: Fields, max_position: int) -> int:
    inner = fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_position)
    return config.integer("original_max_position_embeddings", 1, MAX_POSITIONS, inner)


def _llama3(config: Fields, fields: Fields, max_position: int) -> dict[str, Any]:
    low = fields.number("low_freq_factor", 1e-6, 1e6)
    high = fields.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        raise fields.error("high_freq_factor", f"more than low_freq_factor = {low:g}")
    return {
        **_factor(config, fields, max_position),
        "original_max_position": _original(config, fields, max_position),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _yarn(config: Fields, fields: Fields, max_position: int) -> dict[str, Any]:
    original = _original(config, fields, max_position)
    factor = fields.number("factor", 1.0, 1e4, max_position / original)
    return {
        "factor": factor,
        "original_max_position": original,
        "beta_fast": fields.number("beta_fast", 0.0, 1e6) if fields.values.get("beta_fast") else 32.0,
        "beta_slow": fields.number("beta_slow", 0.0, 1e6) if fields.values.get("beta_slow") else 1.0,
        "truncate": fields.flag("truncate", True),
        "attention_factor": _attention_factor(fields, factor),
        "softmax_factor": (0.1 * fields.number("mscale_all_dim", 0.0, 1e6, 0.0) * math.log(factor) + 1.0) ** 2,
    }


def _attention_factor(fields: Fields, factor: float) -> float:
    """YaRN's temperature (Peng et al. 2023, eq. 15), with the two optional factors of DeepSeek."""
    if "attention_factor" in fields:
        return fields.number("attention_factor", 1e-6, 1e6)
    log = math.log(factor)
    top, bottom = fields.number("mscale", 0.0, 1e6, 0.0), fields.number("mscale_all_dim", 0.0, 1e6, 0.0)
    if top and bottom:
        return (0.1 * top * log + 1.0) / (0.1 * bottom * log + 1.0)
    return 0.1 * log + 1.0


def _longrope(config: Fields, fields: Fields, max_position: int) -> dict[str, Any]:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, within the original context and beyond it."""
    original = _original(config, fields, max_position)
    factor = fields.number("factor", 1.0, 1e4, max(1.0, max_position / original))
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "factor": factor,
        "original_max_position": original,
        "divisors": _divisors(fields, "short_factor"),
        "long_divisors": _divisors(fields, "long_factor"),
        "attention_factor": fields.number(
            "short_mscale", 1e-6, 1e6, fields.number("attention_factor", 1e-6, 1e6, default)
        ),
        "long_attention_factor": fields.number("long_mscale", 0.0, 1e6, 0.0),
    }


def _divisors(fields: Fields, name: str) -> tuple[float, ...]:
    values = fields.values.get(name)
    numbers = values if isinstance(values, list) else []
    good = all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v <= 1e6 for v in numbers)
    if not good or not 0 < len(numbers) <= MAX_DIVISORS:
        raise fields.error(name, f"a list of 1 to {MAX_DIVISORS} numbers above 0, at most 1,000,000")
    return tuple(map(float, numbers))


_PARSERS: Final = {
    "default": _default, "linear": _factor, "dynamic": _factor, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope,
}  # fmt: skip
