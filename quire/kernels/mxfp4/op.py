"""Public linear layers with weights of e2m1, in MXFP4 or NVFP4. Checks shapes and picks the implementation."""

from __future__ import annotations

import torch

from quire.kernels import around, nibbles
from quire.kernels.around import Norm
from quire.kernels.mxfp4.weight import BLOCK, NV_BLOCK, Fp4Weight
from quire.kernels.selector import select


def pack(blocks: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor | None = None) -> Fp4Weight:
    """A matrix [n, k] laid out for the kernels.

    blocks: [n, k / 2] uint8, the lower four bits of each the code of the first of two columns. scales: uint8,
    exponents [n, ceil(k / 32)]; with factors, float32 [n], the bits of e4m3 [n, ceil(k / 16)]. Raises ValueError on a
    mismatch.
    """
    if blocks.dim() != 2 or blocks.dtype != torch.uint8:
        raise ValueError(f"blocks {tuple(blocks.shape)} {blocks.dtype} must be [n, k / 2] uint8")
    n, k = blocks.shape[0], 2 * blocks.shape[1]
    n_blocks = -(-k // (BLOCK if factors is None else NV_BLOCK))
    if scales.shape != (n, n_blocks) or scales.dtype != torch.uint8:
        raise ValueError(f"scales {tuple(scales.shape)} {scales.dtype} must be [{n}, {n_blocks}] uint8")
    if factors is not None and (factors.shape != (n,) or factors.dtype != torch.float32):
        raise ValueError(f"factors {tuple(factors.shape)} {factors.dtype} must be [{n}] float32")
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    return Fp4Weight(k, nibbles.pack(codes), scales.T.contiguous(), factors)


def linear(
    x: torch.Tensor,
    weight: Fp4Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """f(rms_norm(x) @ weight.T + bias): what `kernels.gemm.linear` computes, with a matrix in MXFP4 or NVFP4.

    x: [m, k], last dimension contiguous, float32, bfloat16 or float16. Weights are rounded to that dtype: exact
    in bfloat16, and in any dtype in NVFP4, whose factors multiply sums. Sums are in float32, rounded with the bias; the
    other arguments as in `kernels.gemm.linear`.
    Nothing is read by the host: it may be captured. In a `rows_alone` region a row's bits do not depend on the others.
    Raises ValueError on a mismatch.
    """
    if x.device != weight.codes.device:
        raise ValueError(f"x is on {x.device}, the matrix on {weight.codes.device}")
    around.check(x, (weight.n, weight.k), bias, norm, residual, silu_mul, out)
    arguments = (x, weight, bias, norm, residual, silu_mul, out)
    y: torch.Tensor = select("mxfp4", "linear", *arguments)(*arguments)
    return y
