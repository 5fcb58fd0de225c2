"""Experts of packed matrices on CPU, in the native library: one call for both products of all chosen experts."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import native
from quire.kernels.moe.packed import PackedExperts

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Experts(ctypes.Structure):
    """QuireExperts in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("up", "down", "x", "expert_ids", "weights", "out", "scratch")),
        *((name, _L) for name in ("n", "n_chosen", "n_experts", "x_row", "out_row")),
        *((name, _I) for name in ("dtype", "adds", "n_threads")),
    )


def packed_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: PackedExperts,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See packed.py."""
    out = torch.empty(x.shape, dtype=x.dtype) if residual is None else residual
    (up, down), ids, factors = matrices.native, expert_ids.contiguous(), weights.contiguous()
    scratch = torch.empty(ids.numel() * (2 * x.shape[1] + matrices.down[0].k), dtype=x.dtype)
    call = _Experts(
        ctypes.addressof(up), ctypes.addressof(down), x.data_ptr(), ids.data_ptr(), factors.data_ptr(), out.data_ptr(),
        scratch.data_ptr(), *ids.shape, len(up), x.stride(0), out.stride(0), native.DTYPES[x.dtype],
        residual is not None, torch.get_num_threads(),
    )  # fmt: skip
    native.required().quire_experts(ctypes.byref(call))
    return out
