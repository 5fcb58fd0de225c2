"""Gated activation in CUDA C++ for Hopper (csrc/cuda/rows.cu), dependent launch."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import hopper_rows


class _Args(ctypes.Structure):
    """QuireSiluMulArgs in csrc/cuda/rows.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("n_rows", ctypes.c_int32),
        ("f", ctypes.c_int32),
    ]


def obstacle(x: torch.Tensor) -> str | None:
    """Why this kernel cannot run on these rows, or None. May compile it (seconds)."""
    if x.shape[1] % (2 * hopper_rows.WIDTH):
        return f"rows have 2 x {x.shape[1] // 2} elements: it must be twice a multiple of {hopper_rows.WIDTH}"
    if x.stride(0) % hopper_rows.WIDTH or not hopper_rows.aligned(x):
        return "an address or a row is not at a multiple of 16 bytes"
    return hopper_rows.obstacle(x.dtype)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    n, f = x.shape[0], x.shape[1] // 2
    out = torch.empty(n, f, dtype=x.dtype, device=x.device)
    if out.numel():
        hopper_rows.launch("quire_silu_mul", x, _Args(x.data_ptr(), out.data_ptr(), x.stride(0), n, f))
    return out
