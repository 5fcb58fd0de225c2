"""Integers of 4 bits, a checkpoint's or rounded here, multiplied by activations as they are.

Owns what is stored, how it is cut and filled. Does not own the layout nor products (`kernels/w4a16`), nor the search
for scales (`kernels/qgemm`). Invariant: a checkpoint's codes and zero points are its own; scales are of the model's
dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F

from quire.compute.schemes.coded import PIECE_VALUES, Coded, Source, fill_nibbles
from quire.compute.schemes.launched import Launched
from quire.compute.schemes.scheme import MatrixScheme, NibblesScheme, Product, Stored
from quire.config.codings import Layout
from quire.config.parameters import Cut, Matrix
from quire.config.shares import Share, share
from quire.core.errors import ConfigError
from quire.kernels import moe, nibbles, w4a16
from quire.kernels.qgemm import rounding
from quire.kernels.w4a16 import weight as packing

LAYOUTS: Final = (Layout.PACKED, Layout.GPTQ, Layout.AWQ)
GROUPS: Final = {"int4": 64, "int4-g32": 32, "int4-g128": 128}
"""Value of --quantization → inputs of an output that share a scale."""


@dataclasses.dataclass(frozen=True)
class Int4(NibblesScheme):
    """With a scale for each `group` inputs of an output."""

    dtype: torch.dtype
    """The model's."""
    group: int
    """0: all of them."""
    zeros: bool = False
    order: bool = False
    """Inputs are sorted by their groups."""
    keeps_matrix = False
    name = "int4"

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        found = packing.layout(n, k, self.group or k, self.dtype, zeros=self.zeros, order=self.order)
        return tuple(Stored(name, shape, dtype) for name, (shape, dtype) in found.items())

    def cut(self, matrix: Matrix, rank: int, n_ranks: int) -> Share:
        """Between groups."""
        if self.order and n_ranks > 1 and matrix.cut is Cut.ROW:
            raise ConfigError(
                f"{matrix.name}: inputs sorted by their groups cannot be divided among {n_ranks} ranks: run one, or"
                " --quantization none"
            )
        return share(matrix, rank, n_ranks, column_step=self.group or 1)

    def begin(self, n: int, k: int, device: torch.device) -> Product:
        """See `FilledScheme`. An order that is not filled yet is negative."""
        begun = super().begin(n, k, device)
        if self.order:
            begun.tensors["order"].fill_(-1)
        return begun

    def product(self, tensors: dict[str, torch.Tensor], k: int) -> Launched:
        """See `FilledScheme`."""
        codes, scales = tensors["codes"], tensors["scales"]
        weight = packing.Int4Weight(k, self.group or k, codes, scales, self.zeros, tensors.get("order"))

        def run(x: torch.Tensor, bias: torch.Tensor | None, **around: object) -> torch.Tensor:
            return w4a16.linear(x, weight, bias, **around)  # type: ignore[arg-type]

        return Launched(tensors, run, w4a16.ahead(weight))

    @property
    def makes_banks(self) -> bool:
        """See `WeightScheme`: what experts are multiplied by is in one order."""
        return not self.order

    def bank(self, tensors: dict[str, torch.Tensor], k: int) -> moe.CodedMatrices:
        """See `WeightScheme`."""
        return moe.CodedMatrices(moe.Codes.INT4, k, tensors["codes"], tensors["scales"], self.group, self.zeros)

    def put(self, product: Product, first_row: int, coded: Coded) -> None:
        """See `FilledScheme`."""
        found, order = product.tensors, self._order(product.tensors, coded)
        lines = found["scales"][:, first_row : first_row + coded.n]
        scales = lines[::2] if self.zeros else lines
        scales.copy_(coded.scales.t())
        if not bool(scales.isfinite().all()):
            raise ValueError(f"a scale is NaN, infinite or beyond {self.dtype}")
        if self.zeros:
            assert coded.zeros is not None
            lines[1::2].copy_(coded.zeros.t())
        fill_nibbles(found["codes"][first_row : first_row + coded.n], coded.codes, order)

    def _order(self, found: dict[str, torch.Tensor], coded: Coded) -> torch.Tensor | None:
        """That of a part, which is that of all."""
        if not self.order:
            return None
        assert coded.groups is not None
        order = coded.groups.argsort(stable=True)
        if not torch.equal(coded.groups[order], torch.arange(coded.k) // (self.group or coded.k)):
            raise ValueError(f"its groups are not of {self.group or coded.k} inputs each")
        kept, own = found["order"], order.to(found["order"].device, torch.int32)
        if int(kept[0]) >= 0 and not torch.equal(kept, own):
            raise ValueError("its inputs are in another order than those of the matrix beside it")
        kept.copy_(own)
        return own.long()


@dataclasses.dataclass(frozen=True)
class RoundedInt4(MatrixScheme):
    """A floating matrix, rounded to whole numbers from -8 to 7: a group's scale is the best of some (`best_scales`)."""

    dtype: torch.dtype
    """The model's."""
    group: int
    """One of `GROUPS`."""
    keeps_matrix = False

    @property
    def name(self) -> str:
        """Value of --quantization."""
        return next(name for name, group in GROUPS.items() if group == self.group)

    @property
    def _kept(self) -> Int4:
        return Int4(self.dtype, self.group)

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        return self._kept.stored(n, k)

    def cut(self, matrix: Matrix, rank: int, n_ranks: int) -> Share:
        """Between groups."""
        return self._kept.cut(matrix, rank, n_ranks)

    makes_banks = True

    def bank_tensors(self, n_experts: int, n: int, k: int, device: torch.device) -> dict[str, torch.Tensor]:
        """See `WeightScheme`."""
        return self._kept.bank_tensors(n_experts, n, k, device)

    def of_bank(self, tensors: dict[str, torch.Tensor], expert: int) -> dict[str, torch.Tensor]:
        """See `WeightScheme`."""
        return self._kept.of_bank(tensors, expert)

    def bank(self, tensors: dict[str, torch.Tensor], k: int) -> moe.CodedMatrices:
        """See `WeightScheme`."""
        return self._kept.bank(tensors, k)

    def finish(self, weight: torch.Tensor) -> Product:
        """See `MatrixScheme`."""
        n, k = weight.shape
        device = weight.device
        found = {one.name: one.zeros(device) for one in self.stored(n, k)}
        levels = torch.arange(16.0, device=device) - packing.MIDDLE
        step = max(1, PIECE_VALUES // k)
        for first in range(0, n, step):
            piece = F.pad(weight[first : first + step].float(), (0, -k % self.group))
            rows = piece.view(len(piece), -1, self.group)
            scales = rounding.best_scales(rows, levels).to(self.dtype)
            codes = rounding.nearest(rows * rounding.inverse(scales.float())[..., None], levels)
            found["scales"][:, first : first + step].copy_(scales.t())
            found["codes"][first : first + step].copy_(nibbles.pack(codes.flatten(1)[:, :k].to(torch.uint8)))
        if not bool(found["scales"].isfinite().all()):
            raise ValueError("it holds an infinity or a NaN")
        return self._kept.product(found, k)


def holder(matrix: Matrix, sources: Sequence[Source], device: torch.device, dtype: torch.dtype) -> Int4 | None:
    """What holds a coded matrix as it is; None: nothing does."""
    coding = sources[0].coding
    if any(source.coding != coding for source in sources) or coding.layout not in LAYOUTS or coding.bits != 4:
        return None
    if coding.group % 64 and coding.group != 32:
        return None
    return Int4(dtype, coding.group, zeros=not coding.symmetric, order=coding.act_order)
