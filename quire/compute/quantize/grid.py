"""The numbers that a matrix may be rounded to: codes and scales of a `Format`, and the matrix that they stand for.

Invariant: what `dequantised` gives is, bit for bit, what readers of the folder make of the stored codes and scales: the
product of both in the scales' type.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from quire.config.quantize import Format
from quire.kernels.e4m3 import E4M3, E4M3_MAX

SHARES: Final = tuple(1 - step / 20 for step in range(9))
"""Of the scale that cuts nothing off: those tried in 4 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Rounding of matrices [n, k] of any floating type; of groups, k is a multiple of the group."""

    form: Format
    scale_dtype: torch.dtype
    """That scales are stored in."""

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """[n, k] → [n, groups] in weight's dtype, of the values that `scale_dtype` has. With it the largest value of a
        group lies half a step beyond the largest code, as in compressed-tensors; in 4 bits it may lie further beyond,
        where the squared error of the group is less."""
        groups = weight.unflatten(1, (-1, self.form.group or weight.shape[1]))  # type: ignore[no-untyped-call]
        limit = E4M3_MAX if self.form.is_float else (2**self.form.n_bits - 1) / 2
        widest = groups.abs().amax(2) / limit
        best, least = self._stored(widest), None
        for share in SHARES if self.form.n_bits == 4 else ():
            tried = self._stored(widest * share)
            wide = tried[:, :, None]
            error = (self.dequantised(self.codes(groups, wide), wide) - groups).square().sum(2)
            best = tried if least is None else torch.where(error < least, tried, best)
            least = error if least is None else torch.minimum(error, least)
        return best

    def _stored(self, scales: torch.Tensor) -> torch.Tensor:
        """As `scale_dtype` has them; 1 for 0."""
        rounded: torch.Tensor = scales.to(self.scale_dtype).to(scales.dtype)
        return rounded.masked_fill(rounded == 0, 1.0)

    def of_columns(self, scales: torch.Tensor, n_columns: int) -> torch.Tensor:
        """[n, groups] → [n, n_columns]: the scale of each value."""
        return scales.repeat_interleave(n_columns // scales.shape[1], 1)

    def codes(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The nearest of each value, as numbers of weight's dtype. scales: of each value, or what broadcasts to it."""
        if self.form.is_float:
            return (weight / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(weight.dtype)
        half = 2 ** (self.form.n_bits - 1)
        return (weight / scales).round().clamp(-half, half - 1)

    def dequantised(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """What codes stand for, in their dtype. scales: as for `codes`."""
        return (codes.to(self.scale_dtype) * scales.to(self.scale_dtype)).to(codes.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded matrix."""

    grid: Grid
    codes: torch.Tensor
    """[n, k]."""
    scales: torch.Tensor
    """[n, groups]."""

    @property
    def matrix(self) -> torch.Tensor:
        """[n, k]: what it stands for."""
        return self.grid.dequantised(self.codes, self.grid.of_columns(self.scales, self.codes.shape[1]))


def nearest(weight: torch.Tensor, grid: Grid) -> Rounded:
    """weight: [n, k]. Each value by itself."""
    scales = grid.scales(weight)
    return Rounded(grid, grid.codes(weight, grid.of_columns(scales, weight.shape[1])), scales)


def output_error(difference: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """|X D^T| / |X W^T| of the inputs X whose hessian is X^T X. difference D, weight W: [n, k]; hessian: [k, k]."""
    found, whole = (float(((one @ hessian) * one).sum().clamp(min=0)) for one in (difference, weight))
    return float((found / whole) ** 0.5) if whole > 0 else 0.0
