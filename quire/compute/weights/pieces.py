"""The numbers of one tensor of a file, piece by piece: all of them, or the part that a rank has.

Owns which bytes are read and what they decode to. Does not own files (`checkpoint`) nor where numbers go (`loader`).
Invariants: memory is bounded by the buffer; of rows that a rank does not have no byte is read, of columns all are.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Final

import torch

from quire.compute.weights.checkpoint import read_into
from quire.compute.weights.gguf_blocks import DECODERS
from quire.compute.weights.header import Entry
from quire.config.gguf import BLOCKS
from quire.config.shares import Region

BUFFER_BYTES: Final = 16 << 20
TORCH_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""dtype of the format → dtype of torch, for those that weights may have."""
BLOCK_BYTES: Final = {name: n_bytes for name, _, n_bytes in BLOCKS.values()}
BLOCK_BUFFER_BYTES: Final = 1 << 20
"""Bytes of quantised blocks decoded at once; as float32 they are up to eight times as many."""

Pieces = Iterator[tuple[int, torch.Tensor]]
"""(index of the first number, numbers in one dimension), each valid until the next."""


def pieces(
    descriptor: int, entry: Entry, buffer: torch.Tensor, path: pathlib.Path, region: Region | None = None
) -> Pieces:
    """Over a tensor, or over a region of it, in the order of the part's rows.

    buffer: uint8, at least a row of a region long.
    """
    if region is not None:
        yield from _region(descriptor, entry, buffer, path, region)
        return
    first, step = 0, len(buffer)
    if entry.dtype in DECODERS:
        step = BLOCK_BUFFER_BYTES // BLOCK_BYTES[entry.dtype] * BLOCK_BYTES[entry.dtype]
    for offset in range(0, entry.n_bytes, step):
        raw = buffer[: min(step, entry.n_bytes - offset)]
        read_into(descriptor, raw.numpy().data, entry.start + offset, path)
        piece = _numbers(raw, entry)
        yield first, piece
        first += len(piece)


def _region(descriptor: int, entry: Entry, buffer: torch.Tensor, path: pathlib.Path, region: Region) -> Pieces:
    """Ranges of rows lie together in the file; of their columns what is not wanted is read and left."""
    row_bytes = entry.n_bytes // entry.shape[0]
    limit = BLOCK_BUFFER_BYTES if entry.dtype in DECODERS else len(buffer)
    step, first = max(1, limit // row_bytes), 0
    for start, n_rows in region.rows:
        for row in range(start, start + n_rows, step):
            n_read = min(step, start + n_rows - row)
            raw = buffer[: n_read * row_bytes]
            read_into(descriptor, raw.numpy().data, entry.start + row * row_bytes, path)
            piece = _numbers(raw, entry)
            if region.columns is not None:
                piece = piece.view(n_read, -1).narrow(1, *region.columns).reshape(-1)
            yield first, piece
            first += len(piece)


def _numbers(raw: torch.Tensor, entry: Entry) -> torch.Tensor:
    """uint8 [n] → its numbers in one dimension."""
    if entry.dtype in DECODERS:
        return DECODERS[entry.dtype](raw.view(-1, BLOCK_BYTES[entry.dtype])).view(-1)
    return raw.view(TORCH_DTYPES[entry.dtype])


def take(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of a tensor that is in memory, contiguous."""
    rows = torch.cat([whole.narrow(0, first, number) for first, number in region.rows])
    return rows if region.columns is None else rows.narrow(1, *region.columns).contiguous()
