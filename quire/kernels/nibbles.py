"""Matrices of 4-bit codes as the GPU's kernels read them: eight in a word, in an order that a thread can multiply.

Owns the order: of 64 columns, the four lanes that share a row of a matrix instruction each have 16 that lie side by
side in memory, two words, and those of one instruction are two halves of the bits of one word. Invariant: `unpack` of
`pack` gives the codes back; columns beyond the last are zeros.
"""

from __future__ import annotations

from typing import Final

import torch

BLOCK: Final = 64
"""Columns whose codes are mixed: rows are filled up to a multiple of it."""


def place(column: torch.Tensor) -> torch.Tensor:
    """Where the code of a column lies: word = place / 8, nibble = place % 8. In each 64 columns the bits of the number,
    s s h q q e from above, become q q s h' ..: see the module."""
    step, half, lane, odd = column // 16 % 4, column // 8 % 2, column // 2 % 4, column % 2
    return column // BLOCK * BLOCK + lane * 16 + step // 2 * 8 + odd * 4 + step % 2 * 2 + half


def n_words(k: int) -> int:
    """Of a row of k codes."""
    return -(-k // BLOCK) * BLOCK // 8


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes: [n, k] uint8 below 16 → [n, n_words(k)] int32, contiguous."""
    n, k = codes.shape
    where = place(torch.arange(k, device=codes.device))
    placed = torch.zeros(n, n_words(k) * 8, dtype=torch.uint8, device=codes.device)
    placed[:, where] = codes
    pairs = placed[:, 0::2] | placed[:, 1::2] << 4  # little-endian: the lower nibble of a byte is the first
    return pairs.contiguous().view(torch.int32)


def unpack(words: torch.Tensor, k: int) -> torch.Tensor:
    """The codes [n, k] uint8 that `pack` was given."""
    pairs = words.contiguous().view(torch.uint8)
    placed = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
    return placed[:, place(torch.arange(k, device=words.device))]
