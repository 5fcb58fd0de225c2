"""Weights of GGUF files as numbers: each tensor type's blocks decoded to float32 (or the stored float type).

Owns the meaning of blocks; does not own files or names. Sizes are in `config/gguf.BLOCKS`.
Layouts: the block_* structs of ggml-common.h and dequantize_row_* of ggml-quants.c in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k] → uint8 [n, 2, k]: low halves, then high halves."""
    return torch.stack((packed & 15, packed >> 4), dim=1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, 32 nibbles around 8."""
    return (nibbles(blocks[:, 2:]).flatten(1).float() - 8) * _half(blocks, 0)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, 32 int8."""
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """8 groups of 32 nibbles; 6-bit scale and minimum a group, times two float16 of the block."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    scale, minimum = scales.float() * _half(blocks, 0), minima.float() * _half(blocks, 2)
    groups = nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32).float()
    return (groups * scale[..., None] - minimum[..., None]).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """2 halves of 128: low 4 bits in 64 bytes, high 2 bits in 32, around 32; an int8 scale for each 16."""
    low = nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 4, 32)
    packed = blocks[:, 128:192].reshape(-1, 32)
    high = torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    groups = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scale = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return (groups * scale[..., None]).flatten(1)


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""Type of a tensor → function from uint8 [n, bytes a block] to float32 [n, elements a block]."""
