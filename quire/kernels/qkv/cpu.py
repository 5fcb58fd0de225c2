"""Qk-norm, rotary embedding and page writes on CPU: three functions of the native library."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import native
from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry
from quire.kernels.norm import cpu as norm
from quire.kernels.qkv import reference


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
    """Why the library cannot run these arguments, or None."""
    if k_pages.dtype == E4M3:
        return f"pages are {k_pages.dtype}: it stores qkv's type or int8"
    return None if cos_sin.dtype is torch.float32 else f"cos_sin is {cos_sin.dtype}: it must be float32"


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
    """See op.py; `scales` are of pages that it does not take. Heads without a norm are rotated in place."""
    library = native.required()
    q, k, v = reference.split(qkv, k_pages)
    q = q if q_norm is None else norm.rms_norm(q, q_norm, eps)
    k = k if k_norm is None else norm.rms_norm(k, k_norm, eps)
    _rotate(library, q, k, positions, cos_sin)
    _store(library, k, v, k_pages, v_pages, cache_locs)
    return q


def _rotate(
    library: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    library.quire_rope(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), q.stride(1), q.shape[1],
        k.data_ptr(), k.stride(0), k.stride(1), k.shape[1], q.shape[0],
        positions.data_ptr(), positions.dtype == torch.int64, cos_sin.data_ptr(), cos_sin.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip


def _store(
    library: ctypes.CDLL,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_locs: torch.Tensor,
) -> None:
    _, n_kv_heads, page_size, _ = k_pages.shape
    library.quire_store_kv(
        native.DTYPES[k.dtype], k_pages.dtype == torch.int8,
        k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1),
        k_pages.data_ptr(), v_pages.data_ptr(), cache_locs.data_ptr(), k.shape[0], n_kv_heads, page_size, k.shape[2],
        torch.get_num_threads(),
    )  # fmt: skip
