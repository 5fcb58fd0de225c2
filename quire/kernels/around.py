"""What stands around a product whose kernel does not fuse it: the norm before, activation and residual after.

Owns the checks of these arguments, which all linear layers share, and their order: bias, SwiGLU, residual or out.
Invariant: each step rounds to x's dtype, as the separate operations do.
"""

from __future__ import annotations

import torch

from quire.kernels.act import silu_mul as silu_mul_op

Norm = tuple[torch.Tensor, float]
"""Weight [k] and eps of an RMS norm of x."""


def finish(y: torch.Tensor, residual: torch.Tensor | None, silu_mul: bool, out: torch.Tensor | None) -> torch.Tensor:
    """The result of a linear layer whose product, with its bias, is y [m, n]."""
    if silu_mul:
        y = silu_mul_op(y)
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)


def check(
    x: torch.Tensor,
    shape: tuple[int, int],
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> None:
    """shape: (n, k) of the matrix. Raises ValueError where the arguments of a linear layer do not fit it."""
    n, k = shape
    if x.dim() != 2 or x.shape[1] != k or x.stride(1) != 1 or not x.is_floating_point():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} with strides {x.stride()} does not fit a matrix [{n}, {k}]")
    if silu_mul and n % 2:
        raise ValueError(f"a matrix of {n} rows has no gate and up: with silu_mul their number is even")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit {n} outputs of {x.dtype}")
    if norm is not None and (norm[0].shape != x.shape[1:] or norm[0].dtype != x.dtype):
        raise ValueError(f"norm {tuple(norm[0].shape)} {norm[0].dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    if residual is not None and out is not None:
        raise ValueError("out cannot be given with residual, which takes the result")
    target = out if residual is None else residual
    if target is None:
        return
    wanted = (x.shape[0], n // 2 if silu_mul else n)
    dtypes = (x.dtype, torch.float32) if residual is None else (x.dtype,)
    if target.shape != wanted or target.dtype not in dtypes or target.stride(1) != 1:
        name = "out" if residual is None else "residual"
        raise ValueError(
            f"{name} {tuple(target.shape)} {target.dtype} must be {wanted}, with contiguous rows, {dtypes}"
        )
