"""Entries: the keys, or the values, of one token and head as a page holds them, the last dimension of a pool.

Of a floating type an entry is the head_dim numbers. Of int8 it is head_dim integers and then the four bytes of their
float32 scale, so that whatever moves pages moves their scales. The same in C++: csrc/cpu/entries.h.
"""

from __future__ import annotations

import torch

from quire.kernels.qgemm.reference import quantized_rows

SCALE_BYTES = 4


def entry_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` of an entry."""
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def head_dim_of(pages: torch.Tensor) -> int:
    """Numbers in each entry of a pool."""
    return pages.shape[-1] - (SCALE_BYTES if pages.dtype == torch.int8 else 0)


def encode(x: torch.Tensor) -> torch.Tensor:
    """Floating x [..., head_dim] → int8 entries [..., head_dim + 4]: scale = largest magnitude / 127, rounded half to
    even. An entry with an infinity or a NaN has the scale NaN."""
    rows = x.reshape(-1, x.shape[-1])
    integers, scales = quantized_rows(rows, x.shape[-1])
    entries = torch.cat((integers[:, 0].to(torch.int8), scales.contiguous().view(torch.int8)), dim=1)
    return entries.view(*x.shape[:-1], -1)


def decode(entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Entries [..., size] → their numbers [..., head_dim], multiplied (or converted) in `dtype`."""
    if entries.dtype != torch.int8:
        return entries.to(dtype)
    scales = entries[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return entries[..., :-SCALE_BYTES].to(dtype) * scales.to(dtype)
