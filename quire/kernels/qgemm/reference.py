"""Packed linear layers in plain torch: the oracle. Integer sums are exact; the rest is float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.act import reference as act_reference
from quire.kernels.gemm import Norm
from quire.kernels.norm import reference as norm_reference
from quire.kernels.qgemm.weight import SCHEMES, PackedWeight, pack, unpack, unpack_floats

__all__ = ["SMALLEST", "TOLERANCE", "exact", "linear", "pack", "quantized_rows"]

SMALLEST = 1e-30
"""Rows or groups of activations whose largest magnitude is smaller count as zeros."""

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""dtype → largest |kernel - reference| / (1 + |reference|) for outputs of unit variance."""


def quantized_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] → float32 integers [m, k / group, group] in -127..127 and float32 scales [m, k / group].

    scale = largest magnitude / 127, integer = round(x * (127 / largest)), half to even; k is padded with zeros. A group
    with an infinity or a NaN has the scale NaN.
    """
    groups = F.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))  # type: ignore[no-untyped-call]
    most = groups.abs().amax(-1)
    live = most.isfinite() & (most >= SMALLEST)
    # 127 / tensor would be 127 times the rounded reciprocal.
    factors = torch.where(live, torch.tensor(127.0).div(torch.where(live, most, 1.0)), 0.0)
    integers = torch.where(live[:, :, None], groups * factors[:, :, None], 0.0).round()
    scales = torch.where(live, most / 127, 0.0)
    return integers, torch.where(most.isfinite(), scales, torch.nan)


def linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py."""
    y = exact(x if norm is None else norm_reference.rms_norm(x, *norm), packed, bias).to(x.dtype)
    if silu_mul:
        y = act_reference.silu_mul(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)


def exact(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The result before it is rounded to x's dtype: float64 [m, n]."""
    if packed.scheme not in SCHEMES:
        total = x.double() @ unpack_floats(packed).double().T
        return total if bias is None else total + bias.double()
    weight, w_scales = unpack(packed)
    group = SCHEMES[packed.scheme].group or weight.shape[1]
    integers, x_scales = quantized_rows(x, group)
    total = torch.zeros(x.shape[0], packed.n, dtype=torch.float64)
    for g in range(x_scales.shape[1]):
        sums = integers[:, g].double() @ weight[:, g * group : (g + 1) * group].double().T
        total += sums * x_scales[:, g, None].double() * w_scales[:, g].double()
    return total if bias is None else total + bias.double()
