"""Public norms. Checks shapes and picks the implementation."""

from __future__ import annotations

import torch

from quire.kernels.selector import select


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension (Zhang and Sennrich 2019, eq. 4), as transformers computes it.

    x: [n, h] or [n, heads, h], last dimension contiguous. weight: [h], x's dtype. Returns a new contiguous tensor
    like x: x / sqrt(mean(x^2) + eps) in float32, rounded to x's dtype, times weight. The weight may be read before the
    kernel launched just before has ended: synchronize once after writing parameters. Raises ValueError on a mismatch.
    """
    _check(x, weight)
    y: torch.Tensor = select("norm", "rms_norm", x, weight)(x, weight, eps)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`; x, residual: [n, h] of one dtype; the sum is rounded to that dtype.

    The second output may share memory with `residual` or `x`; do not use these afterwards.
    """
    _check(x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype or x.dim() != 2:
        shapes = f"x {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype}"
        raise ValueError(f"{shapes} must be [n, h] and alike")
    y, total = select("norm", "add_rms_norm", x, weight, residual)(x, residual, weight, eps)
    return y, total


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension (Ba et al. 2016, eq. 4): (x - mean) / sqrt(variance + eps) * weight + bias.

    x: [n, h] or [n, heads, h], last dimension contiguous. weight, bias: [h], or [heads, h] for weights of each head, of
    x's dtype, contiguous; None: 1, and 0. Returns a new contiguous tensor like x, rounded once from float32. Raises
    ValueError on a mismatch.
    """
    for name, table in (("weight", weight), ("bias", bias)):
        if table is None:
            continue
        fits = table.shape in (x.shape[-1:], x.shape[1:]) and table.dtype == x.dtype and table.is_contiguous()
        if not fits:
            raise ValueError(f"{name} {tuple(table.shape)} {table.dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must be [n, h] or [n, heads, h] with contiguous rows")
    y: torch.Tensor = select("norm", "layer_norm", x, weight, bias)(x, weight, bias, eps)
    return y


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() not in (2, 3) or weight.shape != x.shape[-1:] or weight.dtype != x.dtype or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")
