"""A matrix as a checkpoint codes it, whatever the method: codes, scales, and how the two make numbers.

Owns the arithmetic of decoding. Does not own which tensors of a file it comes from (`weights/codings`), nor what it is
kept as (its siblings). Invariant: numbers are computed in float32, where each is one product of two exact factors, and
are rounded once, to the dtype that is asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from quire.config.codings import Coding
from quire.kernels import nibbles

PIECE_VALUES: Final = 1 << 22
"""Numbers that are decoded at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What headers say of a coded matrix, before it is read."""

    coding: Coding
    scale_dtype: str
    """As the format names it."""
    order: torch.Tensor | None = None
    """int64 [n]: which of the file's outputs each of the matrix's is; None: the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class Coded:
    """weight[i, j] = (value of codes[i, j] - zeros[i, g]) * scales[i, g] * factor, g being the group of j."""

    codes: torch.Tensor
    """[n, k]: uint8 or int8; or e4m3, which are values by themselves."""
    scales: torch.Tensor
    """[n, groups]; of float16, bfloat16, float32, e8m0 or e4m3."""
    group: int
    """Neighbouring inputs that share a scale."""
    zeros: torch.Tensor | None = None
    """[n, groups], integers."""
    zero: int = 0
    """Without `zeros`, of all."""
    groups: torch.Tensor | None = None
    """int64 [k]: the group of each input, where neighbours do not share one."""
    table: tuple[float, ...] = ()
    """What codes stand for, where not for themselves."""
    factor: float = 1.0
    """Of the tensor. Its product with a scale is rounded to float32 once: numbers of 4 and 24 bits, or their quotient,
    are so far from where roundings meet that float64 between them changes nothing."""
    input_scale: torch.Tensor | None = None
    """float32 [1]: of what is multiplied by it."""

    @property
    def n(self) -> int:
        """Outputs."""
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.codes.shape[1]

    def part(self, rows: torch.Tensor | None, columns: tuple[int, int] | None) -> Coded:
        """rows: int64, those wanted in that order; columns: (first, number). None: all."""
        codes, scales, zeros, groups = self.codes, self.scales, self.zeros, self.groups
        if rows is not None:
            codes, scales = (one.view(torch.uint8)[rows].view(one.dtype) if one.itemsize == 1 else one[rows]
                             for one in (codes, scales))  # fmt: skip
            zeros = None if zeros is None else zeros[rows]
        if columns is not None:
            first, number = columns
            codes = codes.narrow(1, first, number)
            if groups is not None:
                groups = groups.narrow(0, first, number)
            elif first % self.group and scales.shape[1] > 1:
                groups = torch.arange(first, first + number) // self.group
            elif scales.shape[1] > 1:
                first_group, n_groups = first // self.group, -(-number // self.group)
                scales = scales.narrow(1, first_group, n_groups)
                zeros = None if zeros is None else zeros.narrow(1, first_group, n_groups)
        return dataclasses.replace(self, codes=codes, scales=scales, zeros=zeros, groups=groups)

    def decode(self, out: torch.Tensor) -> None:
        """Into a floating matrix [n, k]."""
        step = max(1, PIECE_VALUES // self.k)
        for first in range(0, self.n, step):
            rows = slice(first, first + step)
            out[rows].copy_(self._numbers(rows))

    def _numbers(self, rows: slice) -> torch.Tensor:
        codes, scales = self.codes[rows], self.scales[rows].float()
        if self.factor != 1:
            scales = scales.double().mul_(self.factor).float()
        if self.table:
            values = torch.tensor(self.table, dtype=torch.float32)[codes.int()]
        else:
            values = codes.float()
        in_groups, wide = values, self._wide
        if self.groups is None and self.k == scales.shape[1] * self.group:
            in_groups, wide = values.view(len(values), -1, self.group), _alone
        if self.zeros is not None:
            in_groups -= wide(self.zeros[rows].float())
        elif self.zero:
            in_groups -= self.zero
        in_groups *= wide(scales)
        return values

    def _wide(self, of_groups: torch.Tensor) -> torch.Tensor:
        """[r, groups] → [r, k], or [r, 1]."""
        if self.groups is not None:
            return of_groups[:, self.groups]
        return of_groups if of_groups.shape[1] == 1 else of_groups.repeat_interleave(self.group, dim=1)[:, : self.k]


def fill_nibbles(words: torch.Tensor, codes: torch.Tensor, order: torch.Tensor | None = None) -> None:
    """words: int32 [n, nibbles.n_words(k)], on any device; codes: uint8 [n, k] below 16. order: int64 [k], columns."""
    step = max(1, PIECE_VALUES // codes.shape[1])
    for first in range(0, len(codes), step):
        piece = codes[first : first + step].to(words.device)
        words[first : first + step].copy_(nibbles.pack(piece if order is None else piece[:, order]))


def _alone(of_groups: torch.Tensor) -> torch.Tensor:
    """[r, groups] → [r, groups, 1]."""
    return of_groups.unsqueeze(2)
