"""The rotary position embedding a config.json asks for: `Rope`, and its parser for old and new spellings.

Owns names, defaults (those of transformers) and limits; does not own the cos/sin tables (`compute/layers/rotary.py`).
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from quire.config.fields import Fields

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn")
DIVIDED: Final = "divided"
"""Type of a GGUF file that carries what each frequency is divided by; no config.json can ask for it."""
MAX_POSITIONS: Final = 2**27
DEFAULT_THETA: Final = 10_000.0

_KNOWN: Final = (
    *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"),
    *("attention_factor", "mscale", "mscale_all_dim", "finetuned"),
)


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the rotary embedding. Fields after `factor` matter only to the types they name."""

    theta: float
    """Base period."""
    type: str = "default"
    """One of `ROPE_TYPES`, or `DIVIDED`."""
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
    """yarn: factor on cos and sin."""
    divisors: tuple[float, ...] = ()
    """divided: one for each of the head_dim / 2 frequencies."""


def parse_rope(config: Fields, max_position: int) -> Rope:
    """`Rope` from a config.json: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before).

    As in transformers, a non-empty `rope_scaling` wins over `rope_parameters`, and a theta inside over one outside.
    Raises ConfigError naming the field.
    """
    name = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    fields = config.nested(name)
    _refuse_unknown(fields)
    outer_theta = config.number("rope_theta", 2.0, 1e15, DEFAULT_THETA)
    partial = fields.number("partial_rotary_factor", 0.0, 1.0, config.number("partial_rotary_factor", 0.0, 1.0, 1.0))
    if partial != 1.0:
        raise (fields if "partial_rotary_factor" in fields else config).error("partial_rotary_factor", "1.0")
    theta = fields.number("rope_theta", 2.0, 1e15, outer_theta)
    kind = fields.choice("rope_type", ROPE_TYPES, fields.choice("type", ROPE_TYPES, "default"))
    return Rope(theta=theta, type=kind, **_PARSERS[kind](config, fields, max_position))


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


_PARSERS: Final = {"default": _default, "linear": _factor, "dynamic": _factor, "llama3": _llama3, "yarn": _yarn}
