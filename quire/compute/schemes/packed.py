"""Matrices in the layout of the CPU's kernels: floating as they are, rounded, or filled with the blocks of a GGUF file.

Owns what is stored and how it is cut. Does not own the layout and the numbers (`kernels/qgemm`).
Invariant: a row of the result has the same bits whatever the other rows and their number are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import torch

from quire.compute.schemes.scheme import FilledScheme, MatrixScheme, Stored
from quire.config.parameters import Matrix
from quire.config.shares import Share, share
from quire.kernels import qgemm
from quire.kernels.fused_step import FusedStep
from quire.kernels.gemm import Norm
from quire.kernels.qgemm import weight as packing
from quire.kernels.qgemm.cpu import NOTHING

GRID: Final = tuple(range(-8, 8))
"""What the 4-bit codes of Q4_0 stand for."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedProduct:
    """The CPU's kernels on a packed matrix. With weights of 8 or 4 bits they round activations to 8."""

    packed: qgemm.PackedWeight

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Product`."""
        both = {"data": self.packed.data, "scales": self.packed.scales}
        return {name: tensor for name, tensor in both.items() if tensor.numel()}

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

    def record(
        self,
        fused: FusedStep,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        *,
        norm: Norm | None = None,
        then: int = NOTHING,
    ) -> None:
        """The product as the next operation of `fused`, on the rows of `x` and into those of `out`."""
        fused.linear(x, self.packed, bias, out, norm=norm, then=then)


def _stored(form: str, n: int, k: int) -> tuple[Stored, ...]:
    both = zip(("data", "scales"), packing.layout(form, n, k), strict=True)
    return tuple(Stored(name, shape, dtype) for name, (shape, dtype) in both if 0 not in shape)


@dataclasses.dataclass(frozen=True)
class Packed(MatrixScheme):
    """The floating matrix, laid out."""

    dtype: torch.dtype
    """One of `kernels.native.DTYPES`."""
    keeps_matrix = False

    @property
    def name(self) -> str:
        """The dtype's."""
        return packing.FLOATS[self.dtype]

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        return _stored(self.name, n, k)

    def finish(self, weight: torch.Tensor) -> PackedProduct:
        """See `MatrixScheme`."""
        return PackedProduct(qgemm.pack_floats(weight))


@dataclasses.dataclass(frozen=True)
class Rounded(MatrixScheme):
    """Integers of 8 or 4 bits, with a scale for each output or for each group of inputs."""

    form: str
    """One of `qgemm.SCHEMES`."""
    keeps_matrix = False

    @property
    def name(self) -> str:
        """Value of --quantization."""
        return self.form

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        return _stored(self.form, n, k)

    def cut(self, matrix: Matrix, rank: int, n_ranks: int) -> Share:
        """Between groups. Where a row has one scale, a rank rounds its own columns by a scale of their own: then ranks
        have other numbers than one rank alone, and not less exact ones."""
        return share(matrix, rank, n_ranks, column_step=qgemm.SCHEMES[self.form].group or 1)

    def finish(self, weight: torch.Tensor) -> PackedProduct:
        """See `MatrixScheme`."""
        return PackedProduct(qgemm.pack(weight, self.form))


@dataclasses.dataclass(frozen=True)
class Blocks(FilledScheme):
    """Blocks of a GGUF file, as integers and scales: dequantised, such a matrix is the file's, number for number.

    There is no floating matrix: whoever reads the file fills the product (`weights/gguf_exact`).
    """

    form: str
    """One of `HELD`."""
    keeps_matrix = False

    @property
    def name(self) -> str:
        """Value of --quantization."""
        return self.form

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        return _stored(self.form, n, k)

    def cut(self, matrix: Matrix, rank: int, n_ranks: int) -> Share:
        """Between blocks, and so that each part begins with a tile of rows."""
        group = qgemm.SCHEMES[self.form].group or 1
        return share(matrix, rank, n_ranks, row_step=packing.TILE, column_step=group)

    def begin(self, n: int, k: int, device: torch.device) -> PackedProduct:
        """See `FilledScheme`."""
        is_nibbles = qgemm.SCHEMES[self.form].bits == 4
        return PackedProduct(packing.empty(self.form, n, k, table=GRID if is_nibbles else ()))


Held = Mapping[FilledScheme, tuple[str, ...]]
"""Scheme → types of GGUF tensors whose blocks it holds as they are; the smallest first."""
HELD: Final[Held] = {Blocks("int4-g32"): ("Q4_0",), Blocks("int8-g32"): ("Q8_0", "Q4_0")}
"""Of the CPU's kernels."""


Scheme = MatrixScheme | FilledScheme
"""Of a matrix: made of floating numbers, or filled with what a file holds."""
