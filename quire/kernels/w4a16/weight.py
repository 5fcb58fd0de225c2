"""A matrix of 4-bit integers in groups with a scale, and where asked a zero point, as the kernels read it.

Owns the layout. Does not own how the integers are found, nor the order of codes in words (`kernels/nibbles`).
Invariant: a weight is (code - zero) * scale, rounded to the scale's dtype once.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from quire.kernels import nibbles

MIDDLE: Final = 8
"""The zero point where there are none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix [n, k]."""

    k: int
    group: int
    """Columns that share a scale."""
    codes: torch.Tensor
    """[n, nibbles.n_words(k)] int32."""
    scales: torch.Tensor
    """[groups, n], of the model's dtype; with zero points [2 * groups, n]: behind the scales of a group its zeros,
    whole numbers from 0 to 16. groups: ceil(k / group)."""
    has_zeros: bool = False
    """Else all are `MIDDLE`."""
    order: torch.Tensor | None = None
    """[k] int32: column i of the codes is column order[i] of the matrix; None: they are in order."""

    @property
    def n(self) -> int:
        """Outputs."""
        return self.codes.shape[0]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it holds, by the names of `layout`."""
        found = {"codes": self.codes, "scales": self.scales, "order": self.order}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def layout(
    n: int, k: int, group: int, dtype: torch.dtype, *, zeros: bool = False, order: bool = False
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name → shape and dtype of the tensors of an `Int4Weight`."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((n, nibbles.n_words(k)), torch.int32),
        "scales": ((-(-k // group) * (1 + zeros), n), dtype),
    }
    if order:
        found["order"] = ((k,), torch.int32)
    return found
