"""Blocks of a GGUF file that a scheme of `--quantization` holds as they are: neither decoded nor rounded again.

Owns which matrices that is and how their blocks become codes and scales; does not own the layout (`kernels/qgemm`) nor
what other types decode to (`gguf_blocks`). Invariant: dequantised, such a matrix is the file's, number for number.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator
from typing import Final

import torch
import torch.nn.functional as F

from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder
from quire.compute.quant import PackedProduct
from quire.compute.weights.checkpoint import read_into
from quire.compute.weights.gguf_blocks import nibbles
from quire.compute.weights.header import Entry
from quire.compute.weights.names import separate_halves
from quire.config.parameters import EMBEDDING
from quire.core.errors import LoadError
from quire.kernels import native, qgemm
from quire.kernels.qgemm import weight as packing

HELD: Final = {"int4-g32": ("Q4_0",), "int8-g32": ("Q8_0", "Q4_0")}
"""Scheme → types of tensors that it holds; the smallest first."""
TABLE: Final = f"{EMBEDDING}.weight"
BLOCK_LEN: Final = 32
"""Values in a block of either type, which share a scale."""
GRID: Final = tuple(range(-8, 8))
"""What the codes of Q4_0 stand for."""
PIECE_ROWS: Final = 16 * packing.TILE
"""Rows that are laid out at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the blocks of one tensor go."""

    packed: qgemm.PackedWeight
    first_row: int


def schemes(quantization: str, device: str) -> tuple[str, ...]:
    """Which of `HELD` may hold matrices for a value of `--quantization`: without one, any that is fast here."""
    if quantization == "auto":
        return tuple(HELD) if device == "cpu" and native.library() is not None else ()
    return (quantization,) if quantization in HELD else ()


def places(model: Decoder, allowed: tuple[str, ...], entries: dict[str, Entry]) -> dict[str, Place]:
    """Give each layer of `model` that a scheme can hold as it is in the file a product to be filled.

    allowed: see `schemes`; entries: name among the model's weights → tensor of the file. → name → where its blocks go.
    A tied head has the blocks of the embedding, which is read a second time for the table itself.
    """
    parts: dict[Linear, dict[str, Entry]] = {}
    for name, layer in model.owners().items():
        if name.endswith(".weight"):
            parts.setdefault(layer, {})[name] = entries[name]
    if model.head.is_tied:
        parts[model.head] = {TABLE: entries[TABLE]}
    return {name: place for layer, found in parts.items() for name, place in _adopt(layer, allowed, found).items()}


def holder(parts: Iterable[Entry], allowed: tuple[str, ...]) -> str | None:
    """The smallest of the allowed schemes for a layer of these parts, in the order of rows; None where none can hold
    their types or one ends within a tile."""
    entries = list(parts)
    if any(entry.shape[0] % packing.TILE for entry in entries[:-1]):
        return None
    return next((name for name in allowed if all(entry.dtype in HELD[name] for entry in entries)), None)


def _adopt(layer: Linear, allowed: tuple[str, ...], parts: dict[str, Entry]) -> dict[str, Place]:
    """A place for each part; none where no scheme can hold them all."""
    entries, scheme = list(parts.values()), holder(parts.values(), allowed)
    if scheme is None:
        return {}
    n, k = sum(entry.shape[0] for entry in entries), entries[0].shape[1]
    packed = packing.empty(scheme, n, k, table=GRID if packing.SCHEMES[scheme].bits == 4 else ())
    found, first_row = {}, 0
    for name, entry in parts.items():
        found[name] = Place(packed, first_row)
        first_row += entry.shape[0]
    layer.adopt(PackedProduct(packed))
    return found


def fill(descriptor: int, entry: Entry, place: Place, n_interleaved: int, path: pathlib.Path) -> Iterator[int]:
    """Read a tensor's blocks into their place; yields the bytes read, piece by piece.

    n_interleaved: as `separate_halves`, 0 if rows are in order. Raises LoadError where a scale is not finite.
    """
    n_rows, row_bytes = entry.shape[0], entry.n_bytes // entry.shape[0]
    step = n_rows if n_interleaved else PIECE_ROWS
    raw = torch.empty(min(step, n_rows) * row_bytes, dtype=torch.uint8)
    for first in range(0, n_rows, step):
        piece = raw[: min(step, n_rows - first) * row_bytes]
        read_into(descriptor, piece.numpy().data, entry.start + first * row_bytes, path)
        n_blocks = entry.shape[1] // BLOCK_LEN
        blocks = piece.view(-1, n_blocks, row_bytes // n_blocks)
        codes, scales = _codes(blocks, entry.dtype, place.packed.table)
        if not bool(scales.isfinite().all()):
            raise LoadError(f"tensor {entry.name} in {path} has NaN or infinite scales")
        if n_interleaved:
            separate_halves(codes, n_interleaved)
            separate_halves(scales, n_interleaved)
        padding = (0, 0, 0, -len(codes) % packing.TILE)
        codes, scales = (F.pad(one, padding) for one in (codes, scales))
        packing.lay_out(place.packed, place.first_row + first, codes, scales)
        yield len(piece)


def _codes(blocks: torch.Tensor, dtype: str, table: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [rows, blocks, bytes] → codes as `lay_out` takes them [rows, k], float16 scales [rows, blocks]."""
    scales = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(2)
    if dtype == "Q8_0":
        return blocks[:, :, 2:].reshape(len(blocks), -1).view(torch.int8).to(torch.int16), scales
    codes = nibbles(blocks[:, :, 2:].flatten(0, 1)).reshape(len(blocks), -1)
    return (codes if table else codes.to(torch.int16) - 8), scales
