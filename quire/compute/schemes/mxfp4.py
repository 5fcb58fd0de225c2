"""MXFP4 of a checkpoint, multiplied by activations as they are.

Owns what is stored, how it is cut and filled. Does not own the layout nor products (`kernels/mxfp4`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from quire.compute.schemes.coded import PIECE_VALUES, Coded, Source
from quire.compute.schemes.launched import Launched
from quire.compute.schemes.scheme import FilledScheme, Product, Stored
from quire.config.codings import Layout
from quire.config.parameters import Matrix
from quire.config.shares import Share, share
from quire.kernels import moe, mxfp4, nibbles
from quire.kernels.mxfp4 import weight as packing


@dataclasses.dataclass(frozen=True)
class Mxfp4(FilledScheme):
    """Codes of 4 bits, and an exponent for each 32 inputs."""

    keeps_matrix = False
    name = "mxfp4"

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        return tuple(Stored(name, shape, dtype) for name, (shape, dtype) in packing.layout(n, k).items())

    def cut(self, matrix: Matrix, rank: int, n_ranks: int) -> Share:
        """Between blocks."""
        return share(matrix, rank, n_ranks, column_step=packing.BLOCK)

    def product(self, tensors: dict[str, torch.Tensor], k: int) -> Launched:
        """See `FilledScheme`."""
        weight = packing.Fp4Weight(k, tensors["codes"], tensors["exponents"])

        def run(x: torch.Tensor, bias: torch.Tensor | None, **around: object) -> torch.Tensor:
            return mxfp4.linear(x, weight, bias, **around)  # type: ignore[arg-type]

        return Launched(tensors, run)

    makes_banks = True

    def bank_tensors(self, n_experts: int, n: int, k: int, device: torch.device) -> dict[str, torch.Tensor]:
        """See `WeightScheme`; scales of a row lie side by side."""
        found = super().bank_tensors(n_experts, n, k, device)
        return {**found, "exponents": found["exponents"].mT.contiguous().mT}

    def bank(self, tensors: dict[str, torch.Tensor], k: int) -> moe.CodedMatrices:
        """See `WeightScheme`."""
        return moe.CodedMatrices(moe.Codes.FP4, k, tensors["codes"], tensors["exponents"].mT, packing.BLOCK)

    def put(self, product: Product, first_row: int, coded: Coded) -> None:
        """See `FilledScheme`."""
        found, rows = product.tensors, slice(first_row, first_row + coded.n)
        found["exponents"][:, rows].copy_(coded.scales.view(torch.uint8).t())
        step = max(1, PIECE_VALUES // coded.k)
        for first in range(0, coded.n, step):
            codes = coded.codes[first : first + step].to(found["codes"].device)
            found["codes"][first_row + first : first_row + first + len(codes)].copy_(nibbles.pack(codes))


def holder(matrix: Matrix, sources: Sequence[Source], device: torch.device, dtype: torch.dtype) -> Mxfp4 | None:
    """What holds a coded matrix as it is; None: nothing does."""
    return Mxfp4() if all(source.coding.layout is Layout.MXFP4 for source in sources) else None
