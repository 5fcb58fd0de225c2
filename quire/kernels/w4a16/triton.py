"""Linear layers of 4 bits on CUDA: one launch, weights made of their codes on the way to the product.

Owns the launch, which products in MXFP4 and NVFP4 share. Does not own the kernel (`triton_kernels`). Invariant: shapes
alone decide what is launched.
"""

from __future__ import annotations

import torch
import triton

from quire.kernels import around
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.w4a16 import triton_kernels as kernels
from quire.kernels.w4a16.weight import Int4Weight


def linear(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    norm: around.Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See op.py."""
    if norm is not None:
        x = rms_norm(x, *norm)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    y = product(x, weight.codes, weight.scales, bias, weight.group, has_zeros=weight.has_zeros)
    return around.finish(y, residual, silu_mul, out)


def product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    *,
    has_zeros: bool = False,
    fp4: bool = False,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [m, k] times the matrix [n, k] of these codes. fp4, factors: see `Fp4Weight`."""
    m, k, n = *x.shape, len(codes)
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    bm = 64 if are_rows_alone() else min(64, max(16, triton.next_power_of_2(m)))
    bn = 64
    if m:
        kernels.product[(triton.cdiv(m, bm) * triton.cdiv(n, bn),)](
            x, x.stride(0), codes, scales, factors, bias, y, m, n,
            K=k, GROUP=group, ZEROS=has_zeros, FP4=fp4, BM=bm, BN=bn,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return y
