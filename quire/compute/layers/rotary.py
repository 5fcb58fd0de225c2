"""The cos/sin table of the rotary embedding, for each scaling type. Built once, read by every layer of every step.

Arithmetic in float32 in the order of transformers, so the tables are equal bit for bit.
Invariant: row p depends on p and on max_model_len only, so keys in the cache stay valid whatever the batch.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from quire.config.arch import ModelArch
from quire.config.rope import DIVIDED, Rope

IDENTITY_DIM: Final = 16
"""Width of a table that rotates nothing: kernels take multiples of it."""


def rotary_tables(arch: ModelArch, max_model_len: int) -> dict[Rope | None, torch.Tensor]:
    """The table of each rotary embedding that a layer of `arch` has, on the CPU; None: of layers without one."""
    mixers = [layer.mixer for layer in arch.layers]
    widths = {mixer.rope: mixer.rope_head_dim for mixer in mixers if mixer.rope is not None}
    found: dict[Rope | None, torch.Tensor] = {
        rope: rope_table(rope, width, max_model_len) for rope, width in widths.items()
    }
    unrotated = next((mixer for mixer in mixers if mixer.rope is None), None)
    if unrotated is not None:
        half = min(IDENTITY_DIM, unrotated.rope_head_dim) // 2
        found[None] = torch.cat((torch.ones(max_model_len, half), torch.zeros(max_model_len, half)), dim=-1)
    return found


def rope_table(rope: Rope, head_dim: int, max_model_len: int) -> torch.Tensor:
    """float32 [max_model_len, rotary_dim] on the CPU: cos of the rotary_dim / 2 angles of a position, then their sin.

    Type 'dynamic' (NTK): transformers derives the base from the length of the sequence at hand once that exceeds the
    original context, and leaves older keys rotated by older bases. Here all rows have one base, that of a sequence of
    max(max_model_len, original) tokens. So with max_model_len within the original context the table is exactly that
    of transformers; beyond it, it is what transformers uses for one prompt of max_model_len tokens, and shorter
    sequences see the same (longer) base. Relative positions stay consistent for every length.
    """
    frequencies = _FREQUENCIES[rope.type](rope, rope.rotary_dim(head_dim), max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    factor = rope.attention_factor
    if rope.long_attention_factor and max_model_len > rope.original_max_position:
        factor = rope.long_attention_factor
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def _powers(theta: float, dim: int) -> torch.Tensor:
    """theta ** (2 i / dim) for i < dim / 2 (Su et al. 2021, section 3.2.2)."""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(rope: Rope, dim: int, max_model_len: int) -> torch.Tensor:
    return 1.0 / _powers(rope.theta, dim)


def _linear(rope: Rope, dim: int, max_model_len: int) -> torch.Tensor:
    """Position interpolation (Chen et al. 2023, eq. 4)."""
    return _default(rope, dim, max_model_len) / rope.factor


def _dynamic(rope: Rope, dim: int, max_model_len: int) -> torch.Tensor:
    """NTK-aware base for a length (Peng et al. 2023, section 3.3 with appendix A.2's s)."""
    if dim == 2:
        return _default(rope, dim, max_model_len)
    stretch = max(max_model_len, rope.original_max_position) / rope.original_max_position
    scale = rope.factor * stretch - (rope.factor - 1)
    return 1.0 / _powers(rope.theta * scale ** (dim / (dim - 2)), dim)


def _llama3(rope: Rope, dim: int, max_model_len: int) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a linear blend between."""
    frequencies = _default(rope, dim, max_model_len)
    context, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / rope.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, stretched)


def _yarn(rope: Rope, dim: int, max_model_len: int) -> torch.Tensor:
    """YaRN, "NTK by parts" (Peng et al. 2023, eq. 17 to 19)."""
    powers = _powers(rope.theta, dim)
    low, high = _yarn_range(rope, dim)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_range(rope: Rope, dim: int) -> tuple[float, float]:
    """Dimensions between which the interpolation sets in, low < high."""

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _divided(rope: Rope, dim: int, max_model_len: int) -> torch.Tensor:
    """Llama 3.1 as GGUF files have it: its scaling written out as one divisor a frequency."""
    return _default(rope, dim, max_model_len) / torch.tensor(rope.divisors, dtype=torch.float32)


def _longrope(rope: Rope, dim: int, max_model_len: int) -> torch.Tensor:
    """LongRoPE (Ding et al. 2024). transformers chooses by the length of the sequence at hand; here all positions have
    the divisors of max_model_len, so that keys in the cache stay valid."""
    divisors = rope.divisors if max_model_len <= rope.original_max_position else rope.long_divisors
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _powers(rope.theta, dim))


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    DIVIDED: _divided,
}
"""Rope type → angle per position, float32 [rotary_dim / 2]."""
