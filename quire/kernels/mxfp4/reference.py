"""Linear layers with weights in MXFP4, in plain torch: the oracle, and what runs on CPU. Sums are in float64."""

from __future__ import annotations

import torch

from quire.kernels import nibbles
from quire.kernels.act import reference as act_reference
from quire.kernels.mxfp4.weight import BLOCK, OFFSET, VALUES, Fp4Weight
from quire.kernels.norm import reference as norm_reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""dtype → largest |kernel - reference| / (1 + |reference|), for results of about 1: up to four roundings."""


def dequantise(weight: Fp4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [n, k]."""
    values = torch.tensor(VALUES, device=weight.codes.device)[nibbles.unpack(weight.codes, weight.k).int()]
    exponents = (weight.exponents.T.int() - OFFSET).repeat_interleave(BLOCK, 1)[:, : weight.k]
    return torch.ldexp(values, exponents).to(dtype)


def linear(
    x: torch.Tensor,
    weight: Fp4Weight,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py; nothing but `residual` or `out` is changed."""
    if norm is not None:
        x = norm_reference.rms_norm(x, *norm)
    y = x.double() @ dequantise(weight, x.dtype).double().T
    y = (y if bias is None else y + bias.double()).to(x.dtype)
    if silu_mul:
        y = act_reference.silu_mul(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)
