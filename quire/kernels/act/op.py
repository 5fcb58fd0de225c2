"""Public gated activation. Checks shapes and picks the implementation."""

from __future__ import annotations

import torch

from quire.kernels import backends


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :f]) * x[:, f:] (SwiGLU, Shazeer 2020, eq. 6 without its matrices).

    x: [n, 2 f], gate first, last dimension contiguous. Returns a new [n, f] of x's dtype. Raises ValueError otherwise.
    """
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must be [n, 2 f] with contiguous rows")
    return backends.choose("act", x.device.type, x).silu_mul(x)
