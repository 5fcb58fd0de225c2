"""RMS norms on CPU, in the native library: float32, bfloat16 and float16."""

from __future__ import annotations

import torch

from quire.kernels import native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See op.py."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _call(x, None, weight, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py. The sum replaces `residual`."""
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _call(x, residual, weight, out, eps)
    return out, residual


def _call(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    address, stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    n_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    native.required().quire_rms_norm(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), head_stride, address, stride, address,
        weight.contiguous().data_ptr(), out.data_ptr(), x.shape[0], n_heads, x.shape[-1], eps, torch.get_num_threads(),
    )  # fmt: skip
