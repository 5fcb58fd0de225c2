"""Linear layers in MXFP4 and NVFP4 on CUDA: the kernel of 4-bit integers with another number made of each code."""

from __future__ import annotations

import torch

from quire.kernels import around
from quire.kernels.mxfp4.weight import Fp4Weight
from quire.kernels.norm import rms_norm
from quire.kernels.w4a16.triton import product


def linear(
    x: torch.Tensor,
    weight: Fp4Weight,
    bias: torch.Tensor | None,
    norm: around.Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See op.py."""
    if norm is not None:
        x = rms_norm(x, *norm)
    y = product(x, weight.codes, weight.scales, bias, weight.block, fp4=True, factors=weight.factors)
    return around.finish(y, residual, silu_mul, out)
