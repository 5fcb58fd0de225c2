"""Blocks of a GGUF file read into the matrices that hold them as they are: neither decoded nor rounded again.

Owns how blocks become codes and scales; does not own which matrices that is (`schemes/choice`), the layout
(`kernels/qgemm`) nor what other types decode to (`gguf_blocks`). Invariant: dequantised, such a matrix is the file's.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Final

import torch
import torch.nn.functional as F

from quire.compute.models.decoder import Decoder
from quire.compute.schemes.choice import parts_of
from quire.compute.schemes.coded import Coded
from quire.compute.schemes.packed import PackedProduct
from quire.compute.schemes.scheme import FilledScheme, Product
from quire.compute.weights.checkpoint import read_into
from quire.compute.weights.gguf_blocks import nibbles
from quire.compute.weights.header import Entry
from quire.compute.weights.names import Rows, rearrange
from quire.config.shares import Region
from quire.core.errors import LoadError
from quire.kernels.mxfp4.weight import VALUES
from quire.kernels.qgemm import weight as packing
from quire.kernels.w4a16.weight import MIDDLE

BLOCK_LEN: Final = 32
"""Values in a block of any of these types, which share a scale."""
PIECE_ROWS: Final = 16 * packing.TILE
"""Rows that are laid out at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the blocks of one tensor go."""

    scheme: FilledScheme
    product: Product
    first_row: int

    def put(self, first: int, blocks: torch.Tensor, dtype: str, rows: Rows) -> None:
        """uint8 [rows, blocks, bytes], from row `first` of the tensor on. Raises ValueError where a scale is not
        finite."""
        product = self.product
        in_nibbles = not isinstance(product, PackedProduct) or bool(product.packed.table)
        codes, scales = _codes(blocks, dtype, in_nibbles=in_nibbles)
        if not bool(scales.float().isfinite().all()):
            raise ValueError("NaN or infinite scales")
        rearrange(codes, rows)
        rearrange(scales, rows)
        if dtype == "MXFP4":
            self.scheme.put(product, self.first_row + first, Coded(codes, scales, BLOCK_LEN, table=VALUES))
        elif isinstance(product, PackedProduct):
            padding = (0, 0, 0, -len(codes) % packing.TILE)
            packing.lay_out(product.packed, self.first_row + first, *(F.pad(one, padding) for one in (codes, scales)))
        else:
            self.scheme.put(product, self.first_row + first, Coded(codes, scales, BLOCK_LEN, zero=MIDDLE))


def places(model: Decoder, entries: Mapping[str, Entry]) -> dict[str, Place]:
    """Name of a parameter → where its blocks go, for each matrix of `model` that holds blocks.

    entries: name of a parameter with its kind → tensor of the file.
    """
    found = {}
    for linear in model.linears():
        if isinstance(linear.scheme, FilledScheme):
            first_row = 0
            names = parts_of(linear.matrix, model.arch, entries)
            for name, (_, n_rows) in zip(names, linear.matrix.parts, strict=True):
                found[name] = Place(linear.scheme, linear.product, first_row)
                first_row += n_rows
    return found


def fill(
    descriptor: int, entry: Entry, place: Place, rows: Rows, path: pathlib.Path, region: Region | None = None
) -> Iterator[int]:
    """Read a tensor's blocks, or those of a rank's part, into their place; yields the bytes read, piece by piece.

    rows: how those of the whole tensor are ordered. region: None: all; its columns are whole blocks.
    Raises LoadError where a scale is not finite.
    """
    n_all, row_bytes = entry.shape[0], entry.n_bytes // entry.shape[0]
    ((first_row, n_rows),), columns = (((0, n_all),), None) if region is None else (region.rows, region.columns)
    first_block, n_blocks = (one // BLOCK_LEN for one in columns or (0, entry.shape[1]))
    own = rows.of_part(n_rows, n_all)
    step = PIECE_ROWS if own.is_ours else n_rows
    raw = torch.empty(min(step, n_rows) * row_bytes, dtype=torch.uint8)
    for first in range(0, n_rows, step):
        piece = raw[: min(step, n_rows - first) * row_bytes]
        read_into(descriptor, piece.numpy().data, entry.start + (first_row + first) * row_bytes, path)
        blocks = piece.view(-1, entry.shape[1] // BLOCK_LEN, row_bytes * BLOCK_LEN // entry.shape[1])
        try:
            place.put(first, blocks[:, first_block : first_block + n_blocks], entry.dtype, own)
        except ValueError as error:
            raise LoadError(f"tensor {entry.name} in {path} has {error}") from None
        yield len(piece)


def _codes(blocks: torch.Tensor, dtype: str, *, in_nibbles: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [rows, blocks, bytes] → codes [rows, k], scales [rows, blocks], of float16 or e8m0. in_nibbles: codes of 4
    bits as they are, below 16; else the integers that they stand for."""
    if dtype == "MXFP4":
        exponents = blocks[:, :, 0].contiguous().view(torch.float8_e8m0fnu)
        return nibbles(blocks[:, :, 1:].flatten(0, 1)).reshape(len(blocks), -1), exponents
    scales = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(2)
    if dtype == "Q8_0":
        return blocks[:, :, 2:].reshape(len(blocks), -1).view(torch.int8).to(torch.int16), scales
    codes = nibbles(blocks[:, :, 2:].flatten(0, 1)).reshape(len(blocks), -1)
    return (codes if in_nibbles else codes.to(torch.int16) - MIDDLE), scales
