"""Public step from a fused projection to attention. Checks shapes and picks the implementation."""

from __future__ import annotations

import torch

from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry
from quire.kernels.selector import select


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
    """Norm and rotate queries and keys, write keys and values into their entries, return the queries.

    qkv: [n, (n_q_heads + 2 n_kv_heads) * d], the heads of q, then of k, then of v; last dimension contiguous. It may be
    changed: do not use it afterwards. q_norm, k_norm: [d], weights of an RMS norm over each head (see kernels.norm)
    that comes first, as in Qwen3, or None for no norm. positions: [n], int64 or int32, each < max_pos.
    cos_sin: [max_pos, rotary_dim] float32, cat(cos, sin) with rotary_dim / 2 columns each: rotary embedding (Su et al.
    2021, eq. 34) with the halves of a head as pairs, as in HF Llama; dimensions beyond rotary_dim pass unrotated.
    k_pages, v_pages: [n_pages, n_kv_heads, page_size, d] of qkv's dtype, or of float8_e4m3fn with `scales`, or int8
    entries [.., d + 4] with a scale each (kernels.kvstore.entry). cache_locs: [n] int64, where each row's token
    lies: page * page_size + offset, distinct except in the dummy page 0; it and positions are not range-checked.
    Norm, its weight and the rotation each round to the dtype, with arithmetic in float32 between. q_norm, k_norm and
    cos_sin may be read before the kernel launched just before has ended: synchronize once after writing them.
    Returns q: [n, n_q_heads, d], last dimension contiguous. Raises ValueError on a mismatch.
    """
    _check_pages(qkv, k_pages, v_pages)
    d = entry.head_dim_of(k_pages)
    _check_norms(qkv, q_norm, k_norm, d)
    if positions.shape != qkv.shape[:1] or cache_locs.shape != qkv.shape[:1] or cache_locs.dtype != torch.int64:
        shapes = f"positions {_shape(positions)} and cache_locs {_shape(cache_locs)}"
        raise ValueError(f"{shapes} do not fit qkv {_shape(qkv)}")
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > d:
        raise ValueError(f"cos_sin {_shape(cos_sin)} does not fit heads of {d}")
    if not (positions.is_contiguous() and cache_locs.is_contiguous() and cos_sin.is_contiguous()):
        raise ValueError("positions, cache_locs and cos_sin must be contiguous")
    arguments = (qkv, q_norm, k_norm, eps, positions, cos_sin, k_pages, v_pages, cache_locs, scales)
    q: torch.Tensor = select("qkv", "rotate_and_store", *arguments)(*arguments)
    return q


def _check_pages(qkv: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    if k_pages.dim() != 4 or k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(f"k_pages {_shape(k_pages)} and v_pages {_shape(v_pages)} must be equal 4-d pools")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k_pages and v_pages must be contiguous")
    n_kv_heads, d = k_pages.shape[1], entry.head_dim_of(k_pages)
    if qkv.dim() != 2 or d < 1 or qkv.shape[1] % d or qkv.shape[1] // d <= 2 * n_kv_heads:
        raise ValueError(f"qkv {_shape(qkv)} does not fit pages {_shape(k_pages)}")
    if k_pages.dtype not in (qkv.dtype, torch.int8, E4M3):
        raise ValueError(f"qkv {_shape(qkv)} does not fit pages {_shape(k_pages)}")
    if qkv.stride(1) != 1:
        raise ValueError("the last dimension of qkv must be contiguous")


def _check_norms(qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, d: int) -> None:
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != (d,) or weight.dtype != qkv.dtype or not weight.is_contiguous()):
            raise ValueError(f"{name} {_shape(weight)} must be contiguous [{d}] {qkv.dtype}")


def _shape(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
