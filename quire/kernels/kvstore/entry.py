"""Entries: the keys, or the values, of one token and head as a page holds them, the last dimension of a pool.

Of a floating type of the activations an entry is the head_dim numbers. Of e4m3 it is head_dim codes, and all keys of a
layer have one scale, all values another (`Scales`). Of int8 it is head_dim integers and then the four bytes of their
float32 scale, so that whatever moves pages moves their scales. The same in C++: csrc/cpu/entries.h.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from quire.kernels.e4m3 import E4M3, E4M3_MAX
from quire.kernels.qgemm.reference import quantized_rows

SCALE_BYTES = 4


class Scales(NamedTuple):
    """Of a layer's pages in e4m3: number = code * scale."""

    k: float = 1.0
    v: float = 1.0


UNIT: Final = Scales()


def entry_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` of an entry."""
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def head_dim_of(pages: torch.Tensor) -> int:
    """Numbers in each entry of a pool."""
    return pages.shape[-1] - (SCALE_BYTES if pages.dtype == torch.int8 else 0)


def movable(pages: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can index and assign on every device: bytes for e4m3."""
    return pages.view(torch.uint8) if pages.dtype == E4M3 else pages


def encode(x: torch.Tensor, dtype: torch.dtype = torch.int8, scale: float = 1.0) -> torch.Tensor:
    """x [..., head_dim] → entries of `dtype`, rounded to nearest, half to even.

    int8: [..., head_dim + 4], scale = largest magnitude / 127; an entry with an infinity or a NaN has the scale NaN.
    e4m3: x * (1 / scale), cut off at `E4M3_MAX`; NaN stays. Another type: x as it is.
    """
    if dtype == E4M3:
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) * (1 / scale)
        return wide.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    if dtype != torch.int8:
        return x
    rows = x.reshape(-1, x.shape[-1])
    integers, scales = quantized_rows(rows, x.shape[-1])
    entries = torch.cat((integers[:, 0].to(torch.int8), scales.contiguous().view(torch.int8)), dim=1)
    return entries.view(*x.shape[:-1], -1)


def decode(entries: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Entries [..., size] → their numbers [..., head_dim], multiplied (or converted) in `dtype`. scale: of e4m3."""
    if entries.dtype == E4M3:
        return entries.to(dtype) * scale
    if entries.dtype != torch.int8:
        return entries.to(dtype)
    scales = entries[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return entries[..., :-SCALE_BYTES].to(dtype) * scales.to(dtype)
