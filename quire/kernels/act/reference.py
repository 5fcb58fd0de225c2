"""SwiGLU's activation in plain torch: the oracle. Arithmetic in float32, or in float64 for float64 inputs."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""dtype → largest |kernel - float64 reference| / (1 + |reference|): two roundings to the dtype."""


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate), rounded to the dtype as transformers does, times up."""
    gate, up = x.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide)).to(x.dtype) * up
