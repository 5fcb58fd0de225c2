"""Linear layers with weights of 4 bits, in plain torch: the oracle, and what runs on CPU. Sums are in float64."""

from __future__ import annotations

import torch

from quire.kernels import nibbles
from quire.kernels.act import reference as act_reference
from quire.kernels.norm import reference as norm_reference
from quire.kernels.w4a16.weight import MIDDLE, Int4Weight

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""dtype → largest |kernel - reference| / (1 + |reference|), for results of about 1: up to four roundings."""


def dequantise(weight: Int4Weight) -> torch.Tensor:
    """The matrix [n, k] of the scales' dtype, its columns in the order of the codes."""
    codes = nibbles.unpack(weight.codes, weight.k).float()
    n_lines = 1 + weight.has_zeros
    scales, *zeros = (
        weight.scales[line::n_lines].T.float().repeat_interleave(weight.group, 1)[:, : weight.k]
        for line in range(n_lines)
    )
    return ((codes - (zeros[0] if zeros else MIDDLE)) * scales).to(weight.scales.dtype)


def linear(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py; nothing but `residual` or `out` is changed."""
    if norm is not None:
        x = norm_reference.rms_norm(x, *norm)
    if weight.order is not None:
        x = x[:, weight.order.long()]
    y = x.double() @ dequantise(weight).double().T
    y = (y if bias is None else y + bias.double()).to(x.dtype)
    if silu_mul:
        y = act_reference.silu_mul(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)
