"""Public linear layers with packed weights. Checks shapes, refuses other devices than the CPU."""

from __future__ import annotations

import math

import torch

from quire.core.errors import ConfigError
from quire.kernels.gemm import Norm
from quire.kernels.qgemm import rounding
from quire.kernels.qgemm import weight as weights
from quire.kernels.qgemm.weight import FLOATS, SCHEMES, PackedWeight
from quire.kernels.selector import select


def pack(weight: torch.Tensor, scheme: str) -> PackedWeight:
    """Quantise a matrix and lay it out for the CPU kernels.

    weight: [n, k] of any floating type on the CPU. scheme: a name in `SCHEMES`; numbers: `rounding.py`. Raises
    ValueError on another shape, type, scheme, on k beyond 131,072, on infinities and NaN, and with groups on a matrix
    that is not zero but below `rounding.LEAST`; ConfigError on another device.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r} is not one of {', '.join(SCHEMES)}")
    _check_matrix(weight)
    largest = max(abs(float(end)) for end in weight.detach().aminmax())
    shape = f"[{weight.shape[0]}, {weight.shape[1]}]"
    if not math.isfinite(largest):
        raise ValueError(f"weight {shape} holds an infinity or a NaN: it cannot be quantised to {scheme}")
    if SCHEMES[scheme].group and 0 < largest < rounding.LEAST:
        problem = f"its largest magnitude is {largest:.3g}, below {rounding.LEAST:.3g}"
        raise ValueError(f"weight {shape} is too small for the scales of {scheme}: {problem}; int8 takes it")
    packed: PackedWeight = select("qgemm", "pack", weight)(weight, scheme, rounding.unit_of(largest))
    return packed


def pack_floats(weight: torch.Tensor) -> PackedWeight:
    """Lay a matrix [n, k] out for the CPU kernels as it is: float32, bfloat16 or float16. Raises as `pack` does."""
    _check_matrix(weight)
    if weight.dtype not in FLOATS:
        raise ValueError(f"weight {weight.dtype} must be one of {', '.join(FLOATS.values())}")
    return weights.pack_floats(weight)


def linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """f(rms_norm(x) @ weight.T + bias): what `kernels.gemm.linear` computes, with a packed weight.

    x: [m, k], last dimension contiguous, float32, bfloat16 or float16; a weight that is not quantised has its type.
    Quantised weights: x is rounded to 8 bits, each row with one scale (int8) or one for each group of the weight; a row
    with an infinity or a NaN gives NaN. The other arguments as in `kernels.gemm.linear`. A row's result does not depend
    on the other rows or on the number of threads, bit for bit. Raises ValueError on a mismatch, ConfigError on another
    device.
    """
    _check_device(x)
    if x.dim() != 2 or x.shape[1] != packed.k or not x.is_floating_point() or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} with strides {x.stride()} does not fit k = {packed.k}")
    if packed.scheme not in SCHEMES and x.dtype is not packed.data.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {packed.data.dtype}")
    if bias is not None and (bias.shape != (packed.n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit n = {packed.n} and x {x.dtype}")
    if norm is not None and (norm[0].shape != x.shape[1:] or norm[0].dtype != x.dtype):
        raise ValueError(f"norm {tuple(norm[0].shape)} {norm[0].dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    _check_target(x, packed, residual, silu_mul, out)
    y: torch.Tensor = select("qgemm", "linear", x)(x, packed, bias, norm, residual, silu_mul, out)
    return y


def _check_target(
    x: torch.Tensor, packed: PackedWeight, residual: torch.Tensor | None, silu_mul: bool, out: torch.Tensor | None
) -> None:
    if (residual is not None) + (out is not None) + silu_mul > 1:
        raise ValueError("only one of residual, out and silu_mul can be given")
    target = out if residual is None else residual
    types = (x.dtype, torch.float32) if residual is None else (x.dtype,)
    if target is not None and (
        target.shape != (len(x), packed.n) or target.dtype not in types or target.stride(1) != 1
    ):
        raise ValueError(f"result {tuple(target.shape)} {target.dtype} must be {(len(x), packed.n)}, one of {types}")
    if silu_mul and packed.n % 2:
        raise ValueError(f"silu_mul halves the output, and {packed.n} is odd")


def _check_matrix(weight: torch.Tensor) -> None:
    _check_device(weight)
    if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape or weight.shape[1] > weights.MAX_K:
        found = f"weight {tuple(weight.shape)} {weight.dtype}"
        raise ValueError(f"{found} must be [n, k], floating, with n >= 1 and 1 <= k <= {weights.MAX_K}")


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ConfigError(f"packed linear layers run on the CPU only, not on {tensor.device}: use bf16 there")
