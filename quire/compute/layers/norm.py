"""RMS norm with its weight, for products that take it in (`Linear`)."""

from __future__ import annotations

import torch

from quire.compute.layers.linear import Make
from quire.kernels.gemm import Norm


class RMSNorm:
    """Norm over the last dimension of size `size`."""

    def __init__(self, make: Make, size: int, eps: float) -> None:
        self.weight = make(size)
        self.eps = eps

    @property
    def pair(self) -> Norm:
        """(weight [size], eps), as `Linear` takes it."""
        return self.weight, self.eps

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """See `Linear.part`; a norm has one part."""
        return {"weight": self.weight}
