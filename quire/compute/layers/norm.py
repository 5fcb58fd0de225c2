"""RMS norm with its weight, alone or after the residual addition."""

from __future__ import annotations

import torch

from quire.compute.layers.linear import Make
from quire.kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    """Norm over the last dimension of size `size`."""

    def __init__(self, make: Make, size: int, eps: float) -> None:
        self.weight = make(size)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, size] or [n, heads, size] → the same shape."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); x and residual are [n, size] and not used afterwards."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """See `Linear.part`; a norm has one part."""
        return {"weight": self.weight}
