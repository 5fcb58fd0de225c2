"""Public linear layers with weights of 4 bits. Checks shapes and picks the implementation."""

from __future__ import annotations

import torch

from quire.kernels import around, nibbles
from quire.kernels.around import Norm
from quire.kernels.selector import select
from quire.kernels.w4a16.weight import Int4Weight


def pack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    group: int,
    order: torch.Tensor | None = None,
) -> Int4Weight:
    """A matrix [n, k] of (code - zero) * scale, laid out for the kernels.

    codes: [n, k] uint8 below 16. scales: [n, ceil(k / group)], of the dtype that x will have. zeros: as scales, uint8
    up to 16; None: 8. group: columns that share a scale: 32, 64, 128 or more in steps of 64, or k.
    order: [k]: column i of the codes is column order[i] of the matrix (GPTQ's act-order, codes sorted by group).
    Raises ValueError on a mismatch.
    """
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ValueError(f"codes {tuple(codes.shape)} {codes.dtype} must be [n, k] uint8")
    n, k = codes.shape
    if group != k and group != 32 and (group < 64 or group % 64):
        raise ValueError(f"groups of {group} of {k} columns: must be 32, a multiple of 64, or all columns")
    shape = (n, -(-k // group))
    if scales.shape != shape or not scales.is_floating_point():
        raise ValueError(f"scales {tuple(scales.shape)} {scales.dtype} must be {shape}, floating")
    if zeros is not None and (zeros.shape != shape or zeros.dtype != torch.uint8):
        raise ValueError(f"zeros {tuple(zeros.shape)} {zeros.dtype} must be {shape} uint8")
    if order is not None and order.shape != (k,):
        raise ValueError(f"order {tuple(order.shape)} must be [{k}]")
    lines = scales if zeros is None else torch.stack([scales, zeros.to(scales.dtype)], dim=2).flatten(1)
    own_order = None if order is None else order.to(torch.int32)
    return Int4Weight(k, group, nibbles.pack(codes), lines.T.contiguous(), zeros is not None, own_order)


def linear(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """f(rms_norm(x) @ weight.T + bias): what `kernels.gemm.linear` computes, with a matrix of 4 bits.

    x: [m, k], last dimension contiguous, of the dtype of the scales. Weights are rounded to that dtype, or not at all
    (the kernel of few rows multiplies codes, and their sums by the scales); sums are in float32, rounded with the
    bias; the other arguments as in `kernels.gemm.linear`. In bfloat16 the sizes of 128 neighbours in a row of x must
    add up to less than 2.3e36: the kernel of few rows multiplies codes raised by 128, whose sums overflow beyond.
    Nothing is read by the host: it may be captured. In a `rows_alone` region a row's bits do not depend on the others.
    Raises ValueError on a mismatch.
    """
    if x.dtype != weight.scales.dtype or x.device != weight.codes.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, the matrix {weight.scales.dtype} on {weight.codes.device}")
    around.check(x, (weight.n, weight.k), bias, norm, residual, silu_mul, out)
    arguments = (x, weight, bias, norm, residual, silu_mul, out)
    y: torch.Tensor = select("w4a16", "linear", *arguments)(*arguments)
    return y
