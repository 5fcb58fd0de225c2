"""A linear layer from torch's product and Quire's norm and activation kernels: any device, any number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels import around
from quire.kernels.norm import rms_norm


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See op.py."""
    if norm is not None:
        x = rms_norm(x, *norm)
    if residual is not None and bias is None and not silu_mul:
        return torch.addmm(residual, x, w.T, out=residual)  # cuBLAS adds before it rounds
    if out is not None and out.dtype is x.dtype and bias is None and not silu_mul:
        return torch.mm(x, w.T, out=out)
    return around.finish(F.linear(x, w, bias), residual, silu_mul, out)
