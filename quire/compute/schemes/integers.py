"""Integers of a checkpoint as they are, and numbers of MXFP4, in the layout of the CPU's kernels.

Owns which codings that layout holds exactly, and the filling. Does not own the layout (`kernels/qgemm`).
Invariant: dequantised, such a matrix is the checkpoint's, number for number; a scale beyond that of its unit is an
error, and one so small that all its numbers are below 1e-8 may be rounded.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import torch.nn.functional as F

from quire.compute.schemes.coded import Coded, Source
from quire.compute.schemes.packed import GRID, Blocks, PackedProduct
from quire.compute.schemes.scheme import Product
from quire.config.codings import Layout
from quire.kernels import qgemm
from quire.kernels.mxfp4.weight import BLOCK, VALUES
from quire.kernels.qgemm import weight as packing
from quire.kernels.qgemm.weight import TILE

LAYOUTS: Final = (Layout.PACKED, Layout.GPTQ, Layout.SCALED)
FORMS: Final = {4: ("int4-g128", "int4", "int4-g32"), 8: ("int8-g32",)}
"""Bits → forms with groups, the largest first."""
UNITS: Final = {"F16": 1.0, "BF16": 2.0**-13}
"""dtype of scales → unit of the float16 ones that they become: bfloat16 from 2**-30 to 4 are numbers of it."""
HALVES: Final = tuple(int(2 * value) for value in VALUES)
"""The numbers of MXFP4 in halves, which are integers."""
PIECE_ROWS: Final = 16 * TILE
"""Rows that are laid out at once."""


@dataclasses.dataclass(frozen=True)
class Integers(Blocks):
    """Of `form`, with scales of a power of two as their unit."""

    unit: float = 1.0
    table: tuple[int, ...] = GRID
    """What codes of 4 bits stand for."""

    def begin(self, n: int, k: int, device: torch.device) -> PackedProduct:
        """See `FilledScheme`."""
        is_nibbles = qgemm.SCHEMES[self.form].bits == 4
        return PackedProduct(packing.empty(self.form, n, k, self.unit, self.table if is_nibbles else ()))

    def put(self, product: Product, first_row: int, coded: Coded) -> None:
        """See `FilledScheme`."""
        assert isinstance(product, PackedProduct)
        form, k = qgemm.SCHEMES[self.form], coded.k
        group = form.group or packing.UNIT
        owners = torch.arange(0, k, form.group or k) // coded.group
        zero = 0 if coded.table else coded.zero + GRID[0] if form.bits == 4 else coded.zero
        unit = 2 * self.unit if coded.table else self.unit
        for first in range(0, coded.n, PIECE_ROWS):
            rows = slice(first, first + PIECE_ROWS)
            codes = coded.codes[rows].to(torch.int16) - zero
            scales = (coded.scales[rows].float() / unit)[:, owners]
            scales = scales.half() if form.group else scales.squeeze(1)
            if not bool(scales.isfinite().all()):
                raise ValueError(f"a scale is NaN, infinite or beyond {65504 * unit:g}")
            more_rows = (0, -len(codes) % TILE)
            codes = F.pad(codes, (0, -k % group, *more_rows))
            scales = F.pad(scales, (0, 0, *more_rows) if form.group else more_rows)
            packing.lay_out(product.packed, first_row + first, codes, scales)


MXFP4: Final = Integers(next(form for form in FORMS[4] if qgemm.SCHEMES[form].group == BLOCK), 2.0**-8, HALVES)
"""Its powers of two from 2**-31 to 2**8 are numbers of float16."""


def holder(source: Source) -> Integers | None:
    """What holds a coded matrix as it is; None: nothing."""
    coding = source.coding
    if coding.layout is Layout.MXFP4:
        return MXFP4
    if coding.layout not in LAYOUTS or coding.is_float or not coding.symmetric or coding.act_order:
        return None
    if coding.bits == 8 and not coding.group:
        return Integers("int8")
    if source.scale_dtype not in UNITS:
        return None
    fitting = (form for form in FORMS.get(coding.bits, ()) if coding.group % qgemm.SCHEMES[form].group == 0)
    return next((Integers(form, UNITS[source.scale_dtype]) for form in fitting), None)
