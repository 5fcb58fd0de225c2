"""Packed weights: what the numbers of a format are, and where they lie in memory.

Owns the formats and the layout that csrc/cpu reads; owns neither rounding (`rounding.py`) nor products. The layout is
the same for every instruction set. Invariant: `unpack(packed)` gives back exactly the integers that were laid out.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import torch.nn.functional as F

from quire.kernels.qgemm import rounding
from quire.kernels.qgemm.arena import arena


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are quantised: weight = integer * scale, symmetric; in 4 bits the integer is one of 16 in a table."""

    bits: int
    group: int
    """Values along k that share a scale; 0: all of an output channel."""

    @property
    def bytes_per_weight(self) -> float:
        """With its share of a scale of a group."""
        return self.bits / 8 + (2 / self.group if self.group else 0)


SCHEMES: Final = {
    "int8": Scheme(8, 0),
    "int8-g32": Scheme(8, 32),
    "int4": Scheme(4, 64),
    "int4-g32": Scheme(4, 32),
    "int4-g128": Scheme(4, 128),
}
"""Also the values of `--quantization`. int4 has the largest groups that are as exact as llama.cpp's Q4_0 on normal
weights (benchmarks/results/quantization_quality.json); on heavier tails they are more exact."""
FLOATS: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Types that are packed as they are."""

UNIT: Final = 32
"""k is padded with zeros to a multiple of it, or to whole groups, where weights are quantised."""
TILE: Final = 64
"""Output channels that lie together; n is padded with zeros to a multiple of it."""
MAX_K: Final = 1 << 17
"""Beyond it a sum of products may not fit 32 bits."""
PIECE_VALUES: Final = 1 << 20
"""Values of a matrix that are rounded at once: memory that packing takes beside the matrix and the result."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [n, k]; weight = integer * scale * unit, or the number itself."""

    scheme: str
    """One of `SCHEMES` or the values of `FLOATS`."""
    n: int
    k: int
    data: torch.Tensor
    """float32, float16: [n/64, k, 64]. bfloat16: [n/64, k/2, 64, 2]. The others uint8. 8 bits: [n/64, k/4, 64, 4], the
    integer plus 128. 4 bits: [n/64, k/8, 64, 4], two indices into `table`: in the low half that of one of the first 4
    of 8 k, in the high half that of the k 4 further."""
    scales: torch.Tensor
    """int8: float32 [n]. Groups: float16 [n/64, k/group, 64]. Both with n padded. Else empty."""
    unit: float = 1.0
    """A power of two."""
    table: tuple[int, ...] = ()
    """4 bits: 16 integers in -127..127."""

    @property
    def n_bytes(self) -> int:
        """Of data and scales: what a product reads."""
        return self.data.nbytes + self.scales.nbytes

    def dequantized(self) -> torch.Tensor:
        """float32 [n, k]."""
        if self.scheme not in SCHEMES:
            return unpack_floats(self).float()
        integers, scales = unpack(self)
        by_group: torch.Tensor = integers.float().unflatten(1, (scales.shape[1], -1))  # type: ignore[no-untyped-call]
        wide = by_group * scales[:, :, None]
        return wide.flatten(1)[:, : self.k].contiguous()


Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def layout(scheme: str, n: int, k: int) -> tuple[Layout, Layout]:
    """Of `PackedWeight.data` and `scales` for a matrix [n, k] under one of `SCHEMES` or the values of `FLOATS`."""
    n_tiles = -(-n // TILE)
    if scheme not in SCHEMES:
        dtype = next(dtype for dtype, name in FLOATS.items() if name == scheme)
        shape = (n_tiles, -(-k // 2), TILE, 2) if scheme == "bfloat16" else (n_tiles, k, TILE)
        return (shape, dtype), ((0,), dtype)
    form = SCHEMES[scheme]
    whole = k + -k % (form.group or UNIT)
    data = (n_tiles, whole * form.bits // 32, TILE, 4), torch.uint8
    if form.group:
        return data, ((n_tiles, whole // form.group, TILE), torch.float16)
    return data, ((n_tiles * TILE,), torch.float32)


def empty(scheme: str, n: int, k: int, unit: float = 1.0, table: tuple[int, ...] = ()) -> PackedWeight:
    """A quantised matrix whose codes and scales are to be filled in; `table`: of 4 bits."""
    data, scales = (arena().empty(*one) for one in layout(scheme, n, k))
    return PackedWeight(scheme, n, k, data, scales, unit, table)


def pack(weight: torch.Tensor, scheme: str, unit: float) -> PackedWeight:
    """See op.py; weight: finite. unit: for scales of groups."""
    form = SCHEMES[scheme]
    table = rounding.CODEBOOK if form.bits == 4 else ()
    n, k = weight.shape
    packed = empty(scheme, n, k, unit if form.group else 1.0, table)
    n_rows = max(1, PIECE_VALUES // weight.shape[1] // TILE) * TILE
    for first in range(0, len(weight), n_rows):
        piece = weight[first : first + n_rows].detach().float()
        rows = F.pad(piece, (0, 0, 0, -len(piece) % TILE))
        if form.group:
            codes, scales = rounding.grouped(rows, form.bits, form.group, packed.unit)
        else:
            codes, scales = rounding.whole_rows(F.pad(rows, (0, -rows.shape[1] % UNIT)))
        lay_out(packed, first, codes, scales)
    return packed


def lay_out(packed: PackedWeight, first: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Put rows `first`, ... of codes [r, k padded] and scales [r] or [r, groups] into place; whole tiles of rows."""
    tiles = slice(first // TILE, first // TILE + len(codes) // TILE)
    is_nibbles = SCHEMES[packed.scheme].bits == 4
    # Four bytes move as 32 bits; a nibble that is shifted stays in its byte.
    words = (codes if is_nibbles else codes + 128).to(torch.uint8).contiguous().view(torch.int32)
    lines = words.view(-1, TILE, words.shape[1])
    if is_nibbles:
        lines = lines[:, :, ::2] | lines[:, :, 1::2] << 4
    packed.data.view(torch.int32)[tiles] = lines.transpose(1, 2).unsqueeze(3)
    if scales.dim() == 2:
        packed.scales[tiles] = scales.view(-1, TILE, scales.shape[1]).transpose(1, 2)
    else:
        packed.scales[first : first + len(scales)] = scales


def pack_floats(weight: torch.Tensor) -> PackedWeight:
    """See op.py."""
    n, k = weight.shape
    name = FLOATS[weight.dtype]
    unit = 2 if name == "bfloat16" else 1
    whole = n % TILE == 0 and k % unit == 0
    padded = weight.detach().contiguous() if whole else F.pad(weight.detach(), (0, -k % unit, 0, -n % TILE))
    lines = padded.view(-1, TILE, padded.shape[1] // unit, unit)
    if unit == 2:  # pairs move as 32 bits
        lines = lines.view(torch.int32)
    lines = lines.transpose(1, 2)
    data = arena().empty(lines.shape, lines.dtype).copy_(lines).view(weight.dtype)
    return PackedWeight(name, n, k, data if unit == 2 else data.squeeze(3), weight.new_empty(0))


def unpack_floats(packed: PackedWeight) -> torch.Tensor:
    """The matrix [n, k] in its own type."""
    lines = packed.data if packed.data.dim() == 4 else packed.data.unsqueeze(3)
    return lines.transpose(1, 2).flatten(2).flatten(0, 1)[: packed.n, : packed.k]


def unpack(packed: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k padded] and float32 scales [n, groups], one of int8."""
    codes = packed.data.transpose(1, 2)
    if SCHEMES[packed.scheme].bits == 8:
        integers = codes.flatten(2).to(torch.int16) - 128
    else:
        halves = torch.stack((codes & 15, codes >> 4), dim=3).flatten(2)
        integers = torch.tensor(packed.table, dtype=torch.int16)[halves.long()]
    if packed.scales.dim() == 1:
        scales = packed.scales[:, None]
    else:
        scales = packed.scales.transpose(1, 2).flatten(0, 1).float() * packed.unit
    return integers.flatten(0, 1)[: packed.n].to(torch.int8), scales[: packed.n]
