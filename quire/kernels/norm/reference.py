"""Norms in plain torch: the oracle. Arithmetic in float32, or in float64 for float64 inputs."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""dtype → largest |kernel - float64 reference| / (1 + |reference|): two roundings to the dtype."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, times weight, over the last dimension."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in x's dtype, and its norm."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, rounded to x's dtype at the end."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)
