"""A matrix of numbers of 4 bits, e2m1, as the kernels read it: in MXFP4, or with `factors` in NVFP4.

Owns the layout. Does not own the order of codes in words (`kernels/nibbles`).
Invariant: a weight is VALUES[code] * 2^(scale - 127) of 32 columns in MXFP4 (OCP Microscaling Formats 1.0, section 5),
VALUES[code] * scale * factor of 16 in NVFP4, whose scales are e4m3 and whose factors are those of tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from quire.kernels import nibbles

BLOCK, NV_BLOCK = 32, 16
"""Columns that share a scale: of MXFP4, of NVFP4."""
VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
OFFSET: Final = 127


@dataclasses.dataclass(frozen=True, slots=True)
class Fp4Weight:
    """A matrix [n, k]."""

    k: int
    codes: torch.Tensor
    """[n, nibbles.n_words(k)] int32."""
    scales: torch.Tensor
    """[ceil(k / block), n] uint8: exponents; of NVFP4 the bits of e4m3."""
    factors: torch.Tensor | None = None
    """float32 [n]: those of NVFP4."""

    @property
    def n(self) -> int:
        """Outputs."""
        return self.codes.shape[0]

    @property
    def block(self) -> int:
        """Columns that share a scale."""
        return BLOCK if self.factors is None else NV_BLOCK

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it holds, by the names of `layout`."""
        found = {"codes": self.codes, "scales": self.scales}
        return found if self.factors is None else {**found, "factors": self.factors}


def layout(n: int, k: int, *, nv: bool = False) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name → shape and dtype of the tensors of an `Fp4Weight`, of NVFP4 where `nv`."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((n, nibbles.n_words(k)), torch.int32),
        "scales": ((-(-k // (NV_BLOCK if nv else BLOCK)), n), torch.uint8),
    }
    return {**found, "factors": ((n,), torch.float32)} if nv else found
