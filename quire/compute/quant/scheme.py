"""Weight schemes: what the matrices of a model become once they are loaded.

Owns which matrices a scheme changes and to what. Does not own number formats (`kernels/qgemm`) nor when a matrix is
complete (`weights/loader`). Embeddings and norms are never quantised. Invariant: packing a matrix takes, beside the
matrix and the result, memory for `PIECE_VALUES` values only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch

from quire.core.errors import LoadError
from quire.kernels import qgemm
from quire.kernels.gemm import Norm

PIECE_VALUES: Final = 1 << 20
"""Values of a matrix that are quantised at once."""
PIECE_ROWS: Final = 64
"""Rows at once are a multiple of it, a tile of the packed layout: pieces follow one another in memory."""


class Product(Protocol):
    """A matrix [n, k] ready for products."""

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [m, k], bias: [n] in x's dtype → x @ matrix.T + bias and what stands around it, as `gemm.linear`."""
        ...


Quantize = Callable[[torch.Tensor], Product]
"""Takes a floating matrix [n, k], which is not needed afterwards."""


class QuantScheme(Protocol):
    """How one model is quantised."""

    name: str
    """Value of `--quantization`."""

    def body(self, weight: torch.Tensor) -> Product:
        """The product of a matrix inside a block."""
        ...

    def head(self, weight: torch.Tensor) -> Product:
        """The product of the output head. A tied head gets its own copy here; the embedding stays as it is."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PackedProduct:
    """The CPU's kernels on a packed matrix. A row's bits do not depend on the others.

    With weights of 8 or 4 bits activations are rounded to 8 bits in the call.
    """

    packed: qgemm.PackedWeight

    @property
    def n_bytes(self) -> int:
        """Weights and scales."""
        return self.packed.n_bytes

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Product`."""
        return qgemm.linear(x, self.packed, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)


class Int8:
    """All matrices in 8 bits, one scale an output channel."""

    name = "int8"

    def body(self, weight: torch.Tensor) -> Product:
        """See `QuantScheme`."""
        return PackedProduct(pack(weight, "int8"))

    def head(self, weight: torch.Tensor) -> Product:
        """See `QuantScheme`."""
        return PackedProduct(pack(weight, "int8"))


class Int4:
    """Blocks in 4 bits, one scale for each 32 weights, rounded to nearest; the head in 8."""

    name = "int4"

    def body(self, weight: torch.Tensor) -> Product:
        """See `QuantScheme`."""
        return PackedProduct(pack(weight, "int4"))

    def head(self, weight: torch.Tensor) -> Product:
        """See `QuantScheme`."""
        return PackedProduct(pack(weight, "int8"))


SCHEMES: Final[Mapping[str, QuantScheme | None]] = {"none": None, "int8": Int8(), "int4": Int4()}
"""Value of `--quantization` → scheme; None leaves the matrices in the model's dtype."""


def pack(weight: torch.Tensor, scheme: qgemm.Scheme) -> qgemm.PackedWeight:
    """`qgemm.pack(weight, scheme)`, a few rows at a time. LoadError if the matrix cannot be packed."""
    try:
        return _packed_in_pieces(weight, scheme)
    except ValueError as error:
        raise LoadError(f"a matrix cannot be quantised: {error}; run without --quantization") from None


def _packed_in_pieces(weight: torch.Tensor, scheme: qgemm.Scheme) -> qgemm.PackedWeight:
    n_rows = max(1, PIECE_VALUES // weight.shape[1] // PIECE_ROWS) * PIECE_ROWS
    n_tiles = -(-len(weight) // PIECE_ROWS)
    data, scales = None, None
    for first in range(0, len(weight), n_rows):
        piece = qgemm.pack(weight[first : first + n_rows], scheme)
        if data is None or scales is None:
            data = qgemm.arena().empty((n_tiles, *piece.data.shape[1:]), piece.data.dtype)
            rows_in_scales = piece.scales.shape[0] // piece.data.shape[0]
            scales = qgemm.arena().empty((n_tiles * rows_in_scales, *piece.scales.shape[1:]), piece.scales.dtype)
        tile = first // PIECE_ROWS
        data[tile : tile + len(piece.data)] = piece.data
        scales[tile * rows_in_scales : tile * rows_in_scales + len(piece.scales)] = piece.scales
    assert data is not None and scales is not None
    return qgemm.PackedWeight(scheme, *weight.shape, data, scales)
