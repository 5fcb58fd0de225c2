"""Linear layers with weights in MXFP4 or NVFP4, in plain torch: the oracle, and what runs on CPU. Sums are float64."""

from __future__ import annotations

import torch

from quire.kernels import nibbles
from quire.kernels.act import reference as act_reference
from quire.kernels.mxfp4.weight import OFFSET, VALUES, Fp4Weight
from quire.kernels.norm import reference as norm_reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""dtype → largest |kernel - reference| / (1 + |reference|), for results of about 1: up to four roundings."""


def dequantise(weight: Fp4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [n, k]."""
    numbers = _numbers(weight)
    return (numbers if weight.factors is None else numbers * weight.factors[:, None]).to(dtype)


def _numbers(weight: Fp4Weight) -> torch.Tensor:
    """The matrix without its factors, in float32."""
    values = torch.tensor(VALUES, device=weight.codes.device)[nibbles.unpack(weight.codes, weight.k).int()]
    scales = weight.scales if weight.factors is None else weight.scales.view(torch.float8_e4m3fn).float()
    each = scales.T.repeat_interleave(weight.block, 1)[:, : weight.k]
    return torch.ldexp(values, each.int() - OFFSET) if weight.factors is None else values * each


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
    y = x.double() @ _numbers(weight).to(x.dtype).double().T
    y = y if weight.factors is None else y * weight.factors.double()
    y = (y if bias is None else y + bias.double()).to(x.dtype)
    if silu_mul:
        y = act_reference.silu_mul(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)
