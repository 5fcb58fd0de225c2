"""RMS norm in CUDA C++ for Hopper (csrc/cuda/rows.cu): one block a row, dependent launch."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import hopper_rows
from quire.kernels.catalog import Slower
from quire.kernels.invariance import are_rows_alone

MAX_ROWS = 512
MANY_ROWS = Slower(f"more than {MAX_ROWS} rows: Triton's kernel is as fast, or up to a quarter faster")
"""Measured on an H200 (lab notes 13)."""

MAX_SIZE = 16384
"""Elements of a row that the threads of a block can hold."""


class _Args(ctypes.Structure):
    """QuireNormArgs in csrc/cuda/rows.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "residual", "weight", "out")],
        *[(name, ctypes.c_int64) for name in ("x_row", "x_head", "residual_row")],
        *[(name, ctypes.c_int32) for name in ("n_rows", "n_heads", "h")],
        ("eps", ctypes.c_float),
    ]  # fmt: skip


def obstacle(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> str | None:
    """Why this kernel does not run on these tensors, or None. May compile it (seconds)."""
    if len(x) > MAX_ROWS and not are_rows_alone():
        return MANY_ROWS
    h = x.shape[-1]
    if h % hopper_rows.WIDTH or not 0 < h <= MAX_SIZE:
        return f"rows have {h} elements: it must be a multiple of {hopper_rows.WIDTH} up to {MAX_SIZE}"
    strides = x.stride(0) | (x.stride(1) if x.dim() == 3 else 0) | (0 if residual is None else residual.stride(0))
    if strides % hopper_rows.WIDTH or not hopper_rows.aligned(x, weight, residual):
        return "an address or a row is not at a multiple of 16 bytes"
    if weight.stride(0) != 1 or (residual is not None and residual.stride(1) != 1):
        return "the weight or the residual is not contiguous"
    return hopper_rows.obstacle(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See op.py."""
    return _run(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py. The sum replaces `residual`."""
    return _run(x, residual, weight, eps), residual


def _run(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    residual_at, residual_row = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    if out.numel():
        args = _Args(
            x.data_ptr(), residual_at, weight.data_ptr(), out.data_ptr(), x.stride(0), head_stride, residual_row,
            x.shape[0], n_heads, x.shape[-1], eps,
        )  # fmt: skip
        hopper_rows.launch("quire_norm", x, args)
    return out
