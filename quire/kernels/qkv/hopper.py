"""Qk-norm, rotary embedding and page writes in CUDA C++ for Hopper (csrc/cuda/rows.cu): one dependent launch."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import hopper_rows
from quire.kernels.catalog import Slower
from quire.kernels.e4m3 import E4M3
from quire.kernels.invariance import are_rows_alone
from quire.kernels.kvstore import entry

MAX_ROWS = 512
MANY_ROWS = Slower(f"more than {MAX_ROWS} rows: Triton's kernel is as fast, or up to a quarter faster")
"""Measured on an H200 (lab notes 13)."""

INTEGERS = Slower("pages of int8: Triton's kernel is the only one")
MAX_LANES = 32
"""Threads of a head, each with two times `hopper_rows.WIDTH` dimensions."""


class _Args(ctypes.Structure):
    """QuireRotateArgs in csrc/cuda/rows.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in (
            "qkv", "q_norm", "k_norm", "positions", "cos_sin", "cache_locs", "q", "k_pages", "v_pages",
        )],
        ("qkv_row", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in (
            "n_rows", "n_q_heads", "n_kv_heads", "d", "half", "page_size", "n_positions", "wide_positions",
            "coded",
        )],
        *[(name, ctypes.c_float) for name in ("eps", "k_inverse", "v_inverse")],
    ]  # fmt: skip


def obstacle(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_locs: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> str | None:
    """Why this kernel does not run on these arguments, or None. May compile it (seconds)."""
    if k_pages.dtype == torch.int8:
        return INTEGERS
    if len(qkv) > MAX_ROWS and not are_rows_alone():
        return MANY_ROWS
    n_pages, _, page_size, d = k_pages.shape
    rotary = cos_sin.shape[1]
    if d % hopper_rows.WIDTH or rotary % (2 * hopper_rows.WIDTH) or d > MAX_LANES * 2 * hopper_rows.WIDTH:
        return f"head_dim {d} and rotary_dim {rotary} are not multiples of 8 and 16, or the first is above 512"
    if cos_sin.dtype is not torch.float32 or positions.dtype not in (torch.int64, torch.int32):
        return f"cos_sin is {cos_sin.dtype} and positions are {positions.dtype}: it must be float32, int64 or int32"
    if not cos_sin.shape[0] or n_pages * page_size >= 1 << 31:
        return f"{n_pages} pages of {page_size} tokens are 2^31 or more, or cos_sin {tuple(cos_sin.shape)} has no rows"
    if qkv.stride(0) % hopper_rows.WIDTH or not hopper_rows.aligned(qkv, q_norm, k_norm, cos_sin, k_pages, v_pages):
        return "an address or a row is not at a multiple of 16 bytes"
    return hopper_rows.obstacle(qkv.dtype)


def rotate_and_store(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_locs: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> torch.Tensor:
    """See op.py. qkv stays as it is, q is contiguous."""
    _, n_kv_heads, page_size, d = k_pages.shape
    n, n_q_heads = qkv.shape[0], qkv.shape[1] // d - 2 * n_kv_heads
    q = torch.empty((n, n_q_heads, d), dtype=qkv.dtype, device=qkv.device)
    norms = [None if weight is None else weight.data_ptr() for weight in (q_norm, k_norm)]
    if n:
        args = _Args(
            qkv.data_ptr(), *norms, positions.data_ptr(), cos_sin.data_ptr(), cache_locs.data_ptr(), q.data_ptr(),
            k_pages.data_ptr(), v_pages.data_ptr(), qkv.stride(0), n, n_q_heads, n_kv_heads, d,
            cos_sin.shape[1] // 2, page_size, cos_sin.shape[0], positions.dtype is torch.int64,
            k_pages.dtype == E4M3, eps, 1 / scales.k, 1 / scales.v,
        )  # fmt: skip
        hopper_rows.launch("quire_rotate_and_store", qkv, args)
    return q
