"""Norms on CPU: RMS in the native library for float32, bfloat16 and float16, else in torch; LayerNorm in torch."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from quire.kernels import native
from quire.kernels.norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See op.py."""
    library = native.library()
    if library is None or x.dtype not in native.DTYPES:
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    _call(library, x, None, weight, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py. The sum replaces `residual`."""
    library = native.library()
    if library is None or x.dtype not in native.DTYPES or residual.stride(1) != 1:
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    _call(library, x, residual, weight, out, eps)
    return out, residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See op.py."""
    if any(table is not None and table.dim() == 2 for table in (weight, bias)):
        return reference.layer_norm(x, weight, bias, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _call(
    library: ctypes.CDLL,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    address, stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    n_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    library.quire_rms_norm(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), head_stride, address, stride, address,
        weight.contiguous().data_ptr(), out.data_ptr(), x.shape[0], n_heads, x.shape[-1], eps, torch.get_num_threads(),
    )  # fmt: skip
