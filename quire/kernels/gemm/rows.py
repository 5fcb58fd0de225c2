"""A linear layer whose rows are alone, of sizes that the kernels for Hopper do not take (rows_kernel.py)."""

from __future__ import annotations

import torch

from quire.kernels import around
from quire.kernels.catalog import unless_alone
from quire.kernels.gemm.rows_kernel import multiply
from quire.kernels.norm import rms_norm


def obstacle(*_: object) -> str | None:
    """Why this is not for such rows, or None."""
    return unless_alone()


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
    wide = out is not None and out.dtype is not x.dtype
    y = torch.empty(len(x), len(w), dtype=torch.float32 if wide else x.dtype, device=x.device)
    multiply(x[:, None], w[None], y[:, None])
    if bias is not None:
        y += bias
    return around.finish(y, residual, silu_mul, out)
