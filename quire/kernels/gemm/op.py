"""Public linear layer with what stands around it in a decoder. Checks shapes and picks the implementation."""

from __future__ import annotations

import torch

from quire.kernels import around
from quire.kernels.around import Norm
from quire.kernels.gemm import hopper
from quire.kernels.selector import select


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """f(rms_norm(x) @ w.T + bias), f being SwiGLU's activation with `silu_mul`; with `residual`, added to it in place.

    x: [m, k], last dimension contiguous. w: [n, k], contiguous, x's dtype, as nn.Linear stores it. bias: [n].
    norm: (weight [k], eps) of an RMS norm of x, see `kernels.norm`. silu_mul: w is gate rows, then as many up rows, the
    result [m, n / 2], see `kernels.act`. residual: [m, n], x's dtype; it takes the sum and is returned. out: where to
    write, x's dtype or float32 (rounded to x's dtype first); not with residual. Returns [m, n or n / 2].
    Rounds to x's dtype where the separate operations would; torch's product with a residual rounds only once.
    A kernel is compiled at the first call that needs it (seconds): call every number of rows once before it matters.
    It reads w and the norm's weight before the kernel launched just before it has ended (programmatic dependent
    launch): synchronize once after writing parameters. Two streams must not run linear layers at the same time: blocks
    that share a tile count each other in one place.
    Raises ValueError on a mismatch.
    """
    _check(x, w, bias, norm, residual, silu_mul, out)
    arguments = (x, w, bias, norm, residual, silu_mul, out)
    y: torch.Tensor = select("gemm", "linear", *arguments)(*arguments)
    return y


def obstacle(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
) -> str | None:
    """Why these arguments of `linear` are not one launch of the Hopper kernel, or None. May compile it (seconds)."""
    _check(x, w, bias, norm, residual, silu_mul, out)
    found = hopper.prepare(x, w, bias, norm, residual, silu_mul, out, apart=False)
    return found if isinstance(found, str) else None


def _check(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> None:
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or x.dtype != w.dtype or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} do not fit")
    if not w.is_contiguous():
        raise ValueError(f"w {tuple(w.shape)} with strides {w.stride()} must be contiguous")
    around.check(x, (w.shape[0], w.shape[1]), bias, norm, residual, silu_mul, out)
