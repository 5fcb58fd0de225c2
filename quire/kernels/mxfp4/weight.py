"""A matrix in MXFP4 as the kernels read it: codes e2m1, and for each 32 of a row the exponent of a power of two.

Owns the layout. Does not own the order of codes in words (`kernels/nibbles`).
Invariant: a weight is VALUES[code] * 2^(exponent - 127) (OCP Microscaling Formats 1.0, section 5).
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from quire.kernels import nibbles

BLOCK: Final = 32
VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
OFFSET: Final = 127


@dataclasses.dataclass(frozen=True, slots=True)
class Fp4Weight:
    """A matrix [n, k]."""

    k: int
    codes: torch.Tensor
    """[n, nibbles.n_words(k)] int32."""
    exponents: torch.Tensor
    """[ceil(k / 32), n] uint8."""

    @property
    def n(self) -> int:
        """Outputs."""
        return self.codes.shape[0]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it holds, by the names of `layout`."""
        return {"codes": self.codes, "exponents": self.exponents}


def layout(n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name → shape and dtype of the tensors of an `Fp4Weight`."""
    return {"codes": ((n, nibbles.n_words(k)), torch.int32), "exponents": ((-(-k // BLOCK), n), torch.uint8)}
