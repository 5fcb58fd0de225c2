"""A linear layer and what is fused with it, in plain torch: the oracle, and what runs for many rows.

Each step rounds to x's dtype, as separate torch operations do; in float64 nothing is lost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.act import reference as act_reference
from quire.kernels.norm import reference as norm_reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""dtype → largest |kernel - float64 reference| / (1 + |reference|), for results of about 1: up to four roundings."""


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py; nothing but `out` is changed."""
    if norm is not None:
        x = norm_reference.rms_norm(x, *norm)
    y = F.linear(x, w, bias)
    if silu_mul:
        y = act_reference.silu_mul(y)
    if residual is not None:
        y = residual + y
    return y if out is None else out.copy_(y)
