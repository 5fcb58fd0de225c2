"""Weights of GGUF files as numbers: each tensor type's blocks decoded to float32 (or the stored float type).

Owns the meaning of blocks; does not own files or names. Sizes are in `config/gguf.BLOCKS`.
Layouts: the block_* structs of ggml-common.h and dequantize_row_* of ggml-quants.c in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from quire.kernels.mxfp4.weight import VALUES

_IQ4_VALUES: Final = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)).float()
"""What the indices of IQ4_NL and IQ4_XS stand for (kvalues_iq4nl)."""
_E2M1: Final = torch.tensor(VALUES)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k] → uint8 [n, 2, k]: low halves, then high halves."""
    return torch.stack((packed & 15, packed >> 4), dim=1)


def _fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [n, k] → uint8 [n, 8 / bits, k]: the bytes' lowest bits, then the next."""
    return torch.stack([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, 32 nibbles around 8."""
    return (nibbles(blocks[:, 2:]).flatten(1).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, minimum, 32 nibbles."""
    return nibbles(blocks[:, 4:]).flatten(1).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, 32 fifth bits, 32 nibbles, around 16."""
    return ((nibbles(blocks[:, 6:]).flatten(1) | _fifth_bits(blocks[:, 2:6])).float() - 16) * _half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, minimum, 32 fifth bits, 32 nibbles."""
    values = (nibbles(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks[:, 4:8])).float()
    return values * _half(blocks, 0) + _half(blocks, 2)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4] → uint8 [n, 32], 16 or 0: bit i of the little-endian word belongs to value i."""
    return _fields(packed, 1).transpose(1, 2).flatten(1) << 4


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, 32 indices into a table."""
    return _IQ4_VALUES[nibbles(blocks[:, 2:]).flatten(1).long()] * _half(blocks, 0)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """8 groups of 32 indices into a table; 6-bit scales around 32, high two bits in 2 bytes and low halves in 4."""
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    high = _fields(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    scale = ((low | high << 4).float() - 32) * _half(blocks, 0)
    groups = _IQ4_VALUES[nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 8, 32).long()]
    return (groups * scale[..., None]).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Power of two, 32 numbers of 4 bits: as OCP has them, an exponent of 255 is NaN."""
    return _E2M1[nibbles(blocks[:, 1:]).flatten(1).int()] * blocks[:, :1].view(torch.float8_e8m0fnu).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, 32 int8."""
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """8 groups of 32 nibbles; 6-bit scale and minimum a group, times two float16 of the block."""
    scale, minimum = _scales_and_minima(blocks)
    groups = nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32).float()
    return (groups * scale - minimum).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As Q4_K, with bit g of 32 bytes as the fifth bit of group g."""
    scale, minimum = _scales_and_minima(blocks)
    low = nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    groups = (low | _fields(blocks[:, 16:48], 1) << 4).float()
    return (groups * scale - minimum).flatten(1)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K, float32 [n, 8, 1] each: 6 bits in 12 bytes, times the block's two float16."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    scale, minimum = scales.float() * _half(blocks, 0), minima.float() * _half(blocks, 2)
    return scale[..., None], minimum[..., None]


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 two-bit numbers; a byte a group holds a 4-bit scale and minimum, times two float16 at the end."""
    packed = blocks[:, :16]
    scale, minimum = (packed & 15).float() * _half(blocks, 80), (packed >> 4).float() * _half(blocks, 82)
    groups = _fields(blocks[:, 16:80].reshape(-1, 32), 2).reshape(-1, 16, 16).float()
    return (groups * scale[..., None] - minimum[..., None]).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16: low two bits in 64 bytes, and 4 less where bit g of the first 32 bytes is not set; 6-bit scales
    around 32, low halves in 8 bytes and high two bits in 4."""
    packed = blocks[:, 96:108]
    scales = nibbles(packed[:, :8]).flatten(1) | _fields(packed[:, 8:], 2).flatten(1) << 4
    scale = (scales.float() - 32) * _half(blocks, 108)
    low = _fields(blocks[:, 32:96].reshape(-1, 32), 2).reshape(-1, 16, 16).float()
    high = _fields(blocks[:, :32], 1).reshape(-1, 16, 16).float()
    return ((low - 4 * (1 - high)) * scale[..., None]).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """2 halves of 128: low 4 bits in 64 bytes, high 2 bits in 32, around 32; an int8 scale for each 16."""
    low = nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 4, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 32), 2)
    groups = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scale = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return (groups * scale[..., None]).flatten(1)


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Type of a tensor → function from uint8 [n, bytes a block] to float32 [n, elements a block]."""
