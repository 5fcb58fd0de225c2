"""Public linear layers with weights and activations of 8 bits. Checks shapes and picks the implementation."""

from __future__ import annotations

from typing import Final

import torch

from quire.kernels import around
from quire.kernels.around import Norm
from quire.kernels.selector import select

BLOCK: Final = 128
"""Sides of a block of weights with one scale, and columns of activations with one."""


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """f(rms_norm(x) @ (weight * weight_scale).T + bias): what `kernels.gemm.linear` computes, both factors in e4m3.

    x: [m, k], last dimension contiguous, float32, bfloat16 or float16. weight: [n, k] float8_e4m3fn, contiguous.
    weight_scale: float32, contiguous: [1]; [n]; or [ceil(n / 128), ceil(k / 128)], one for each block of weights.
    x is rounded to e4m3, divided by its scale, which is largest / 448 of each row, or of each 128 columns of a row
    where weights have blocks. x_scale: [1] float32: that of all x instead (not with blocks); what is beyond is cut off.
    A scale is at least 1e-10 / 448. Sums are in float32, at the latest after 128 columns; rounded to x's dtype with the
    bias, then as in `kernels.gemm.linear`, as are the other arguments.
    Nothing is read by the host: it may be captured. In a `rows_alone` region a row's bits do not depend on the others.
    Raises ValueError on a mismatch.
    """
    _check(x, weight, torch.float8_e4m3fn)
    n, k = weight.shape
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    _check_scale("weight_scale", weight_scale, ((1,), (n,), blocks))
    if x_scale is not None:
        _check_scale("x_scale", x_scale, ((1,),))
        if weight_scale.dim() == 2:
            raise ValueError(
                "x_scale cannot be given where weights have scales of blocks: x has one of each 128 columns"
            )
    around.check(x, (n, k), bias, norm, residual, silu_mul, out)
    arguments = (x, weight, weight_scale, x_scale, bias, norm, residual, silu_mul, out)
    y: torch.Tensor = select("w8a8", "linear_fp8", *arguments)(*arguments)
    return y


def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `linear_fp8` with integers. weight: [n, k] int8; weight_scale: [1] or [n] float32. Each row of x is divided by
    its scale, largest / 127, and rounded to the nearest integer, ties to even. Sums are exact (k up to 131,072)."""
    _check(x, weight, torch.int8)
    n, k = weight.shape
    _check_scale("weight_scale", weight_scale, ((1,), (n,)))
    around.check(x, (n, k), bias, norm, residual, silu_mul, out)
    arguments = (x, weight, weight_scale, None, bias, norm, residual, silu_mul, out)
    y: torch.Tensor = select("w8a8", "linear_int8", *arguments)(*arguments)
    return y


def _check(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> None:
    if weight.dim() != 2 or weight.dtype != dtype or not weight.is_contiguous():
        raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype} must be [n, k] {dtype}, contiguous")
    if weight.device != x.device:
        raise ValueError(f"x is on {x.device}, weight on {weight.device}")


def _check_scale(name: str, scale: torch.Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if tuple(scale.shape) not in shapes or scale.dtype != torch.float32 or not scale.is_contiguous():
        known = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} {list(scale.shape)} {scale.dtype} must be {known} float32, contiguous")
