"""Linear layers with weights and activations of 8 bits, in plain torch: the oracle, and what runs on CPU.

What is multiplied is what kernels multiply, code for code; sums are in float64 and rounded to x's dtype once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.act import reference as act_reference
from quire.kernels.e4m3 import E4M3, E4M3_MAX
from quire.kernels.norm import reference as norm_reference

BLOCK = 128
LARGEST = {E4M3: E4M3_MAX, torch.int8: 127.0}
LEAST = 1e-10
"""So large the largest of what has one scale is taken to be at least."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""dtype → largest |kernel - reference| / (1 + |reference|), for results of about 1: up to four roundings, and what
sums of e4m3 lose in tensor cores (about 1e-3 of a result's usual size)."""


def quantise(
    x: torch.Tensor, dtype: torch.dtype, group: int, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] → its codes [m, k], and the scale [m, ceil(k / group)] float32 of each `group` columns; scale: [1], of
    all instead."""
    m, k = x.shape
    padded = F.pad(x.float(), (0, -k % group)).view(m, -(-k // group), group)
    if scale is None:
        # By a tensor: on GPUs torch multiplies by 1 / number, and a scale of another last digit moves codes at ties.
        scales = padded.abs().amax(-1).clamp(min=LEAST) / padded.new_full((1,), LARGEST[dtype])
    else:
        scales = scale.expand(m, padded.shape[1]).contiguous()
    divided = (padded / scales[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype]).flatten(1)[:, :k]
    return (divided.round() if dtype is torch.int8 else divided).to(dtype), scales


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The matrix [n, k] in float64."""
    wide = weight.double()
    if scale.dim() == 1:
        return wide * scale.double()[:, None]
    n, k = weight.shape
    spread = scale.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return wide * spread


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py; nothing but `residual` or `out` is changed."""
    if norm is not None:
        x = norm_reference.rms_norm(x, *norm)
    k = x.shape[1]
    group = BLOCK if weight_scale.dim() == 2 else k
    codes, scales = quantise(x, weight.dtype, group, x_scale)
    rounded = codes.double() * scales.double().repeat_interleave(group, 1)[:, :k]
    y = rounded @ dequantise(weight, weight_scale).T
    y = (y if bias is None else y + bias.double()).to(x.dtype)
    if silu_mul:
        y = act_reference.silu_mul(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)


linear_int8 = linear_fp8
