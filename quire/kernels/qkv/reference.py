"""Qk-norm, rotary embedding and page writes in plain torch: the oracle. Float32, or float64 for float64 inputs."""

from __future__ import annotations

import torch

from quire.kernels.kvstore import entry
from quire.kernels.norm import reference as norm

TOLERANCE = {torch.float64: 2e-12, torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}
"""dtype → largest |kernel - float64 reference| / (1 + largest |reference| of its head): three roundings."""


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
    """See op.py; leaves qkv as it was."""
    q, k, v = split(qkv, k_pages)
    q = q if q_norm is None else norm.rms_norm(q, q_norm, eps)
    k = k if k_norm is None else norm.rms_norm(k, k_norm, eps)
    store(rotate(k, positions, cos_sin), v, k_pages, v_pages, cache_locs, scales)
    return rotate(q, positions, cos_sin)


def split(qkv: torch.Tensor, k_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views [n, heads, d] of the fused projection: q, k, v."""
    n_kv_heads = k_pages.shape[1]
    heads = qkv.unflatten(1, (-1, entry.head_dim_of(k_pages)))  # type: ignore[no-untyped-call]
    q, k, v = heads.split((heads.shape[1] - 2 * n_kv_heads, n_kv_heads, n_kv_heads), dim=1)
    return q, k, v


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `cos_sin.shape[1]` dimensions of each head of x: [n, heads, d]."""
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def store(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, cache_locs: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> None:  # fmt: skip
    """Indexed assignment; of equal ones an unspecified one wins (only the dummy page has such)."""
    places, offsets = cache_locs // k_pages.shape[2], cache_locs % k_pages.shape[2]
    for x, pages, scale in ((k, k_pages, scales.k), (v, v_pages, scales.v)):
        entry.movable(pages)[places, :, offsets] = entry.movable(entry.encode(x, pages.dtype, scale))
