"""Numbers of 4 bits of a checkpoint, in MXFP4 or NVFP4, multiplied by activations as they are.

Owns what is stored, how it is cut and filled. Does not own the layout nor products (`kernels/mxfp4`).
Invariant: codes, scales and factors are the checkpoint's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from quire.compute.schemes.coded import Coded, Source, fill_nibbles
from quire.compute.schemes.launched import Launched
from quire.compute.schemes.scheme import NibblesScheme, Product, Stored
from quire.config.codings import Layout
from quire.config.parameters import Matrix
from quire.config.shares import Share, share
from quire.kernels import moe, mxfp4
from quire.kernels.mxfp4 import weight as packing


@dataclasses.dataclass(frozen=True)
class Fp4(NibblesScheme):
    """Codes of 4 bits with an exponent for each 32 inputs; or an e4m3 for each 16, and a factor for each output."""

    nv: bool
    """In NVFP4."""
    keeps_matrix = False
    makes_banks = True

    @property
    def name(self) -> str:
        """Of the format."""
        return "nvfp4" if self.nv else "mxfp4"

    @property
    def _block(self) -> int:
        return packing.NV_BLOCK if self.nv else packing.BLOCK

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        return tuple(Stored(name, shape, dtype) for name, (shape, dtype) in packing.layout(n, k, nv=self.nv).items())

    def cut(self, matrix: Matrix, rank: int, n_ranks: int) -> Share:
        """Between blocks."""
        return share(matrix, rank, n_ranks, column_step=self._block)

    def product(self, tensors: dict[str, torch.Tensor], k: int) -> Launched:
        """See `FilledScheme`."""
        weight = packing.Fp4Weight(k, tensors["codes"], tensors["scales"], tensors.get("factors"))

        def run(x: torch.Tensor, bias: torch.Tensor | None, **around: object) -> torch.Tensor:
            return mxfp4.linear(x, weight, bias, **around)  # type: ignore[arg-type]

        return Launched(tensors, run)

    def bank(self, tensors: dict[str, torch.Tensor], k: int) -> moe.CodedMatrices:
        """See `WeightScheme`."""
        codes, scales, factors = tensors["codes"], tensors["scales"], tensors.get("factors")
        return moe.CodedMatrices(moe.Codes.FP4, k, codes, scales, self._block, factors=factors)

    def put(self, product: Product, first_row: int, coded: Coded) -> None:
        """See `FilledScheme`."""
        found, rows = product.tensors, slice(first_row, first_row + coded.n)
        found["scales"][:, rows].copy_(coded.scales.view(torch.uint8).t())
        if self.nv:
            found["factors"][rows].fill_(coded.factor)
        fill_nibbles(found["codes"][rows], coded.codes)


def holder(matrix: Matrix, sources: Sequence[Source], device: torch.device, dtype: torch.dtype) -> Fp4 | None:
    """What holds a coded matrix as it is; None: nothing does."""
    layouts = {source.coding.layout for source in sources}
    return Fp4(nv=layouts == {Layout.NVFP4}) if layouts in ({Layout.MXFP4}, {Layout.NVFP4}) else None
