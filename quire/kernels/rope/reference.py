"""Rotary embedding in plain torch: the oracle. Arithmetic in float32, or in float64 for float64 inputs."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""dtype → largest |kernel - float64 reference| / (1 + |reference|): one rounding to the dtype."""


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first `cos_sin.shape[1]` dimensions of each head of q and k."""
    rows = cos_sin[positions.long()].unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
