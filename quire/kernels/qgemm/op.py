"""Public quantised linear layers. Checks shapes, refuses other devices than the CPU."""

from __future__ import annotations

import torch

from quire.core.errors import ConfigError
from quire.kernels import backends
from quire.kernels.qgemm import weight as weights
from quire.kernels.qgemm.weight import PackedWeight, Scheme


def pack(weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
    """Quantise a matrix and lay it out for the CPU kernels; takes some five times the float32 memory of the matrix.

    weight: [n, k] of any floating type on the CPU. scheme: 'int8' (a scale an output channel) or 'int4' (a bfloat16
    scale for each 32 values along k); both symmetric. Raises ValueError on another shape, type, scheme, on k beyond
    131,072, and on infinities and NaN; ConfigError on another device.
    """
    _check_device(weight)
    if scheme not in weights.SCHEMES:
        raise ValueError(f"scheme {scheme!r} is not one of {', '.join(weights.SCHEMES)}")
    if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape or weight.shape[1] > weights.MAX_K:
        found = f"weight {tuple(weight.shape)} {weight.dtype}"
        raise ValueError(f"{found} must be [n, k], floating, with n >= 1 and 1 <= k <= {weights.MAX_K}")
    return weights.pack(weight, scheme)


def linear(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias with x rounded to 8 bits: each row with one scale (int8) or one for each 32 values (int4).

    x: [m, k], last dimension contiguous, float32, bfloat16 or float16. bias: [n], x's dtype. Returns [m, n] in x's
    dtype. A row's result does not depend on the other rows or on the number of threads, bit for bit. A row with an
    infinity or a NaN gives NaN. Raises ValueError on a mismatch, ConfigError on another device.
    """
    _check_device(x)
    if x.dim() != 2 or x.shape[1] != packed.k or not x.is_floating_point() or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} with strides {x.stride()} does not fit k = {packed.k}")
    if bias is not None and (bias.shape != (packed.n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit n = {packed.n} and x {x.dtype}")
    return backends.module("qgemm", "cpu").linear(x, packed, bias)


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ConfigError(f"quantised linear layers run on the CPU only, not on {tensor.device}: use bf16 there")
