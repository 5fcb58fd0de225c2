"""Public rotary embedding. Checks shapes and picks the implementation by device."""

from __future__ import annotations

import torch

from quire.kernels import backends


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding (Su et al. 2021, eq. 34) with the halves of a head as pairs, as in HF Llama.

    q: [n, hq, d], k: [n, hk, d], one dtype; last dimension contiguous, so slices of a fused qkv are welcome.
    positions: [n], int64 or int32, each < max_pos. cos_sin: [max_pos, rotary_dim] float32, cat(cos, sin) with
    rotary_dim / 2 columns each; dimensions beyond rotary_dim pass unchanged. Arithmetic in float32.
    Returns (q, k), rotated; they may be the given tensors, changed in place. Raises ValueError on a mismatch.
    """
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype} must be [n, heads, d]")
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError("the last dimension of q and k must be contiguous")
    if positions.shape != q.shape[:1] or cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > q.shape[2]:
        shapes = f"positions {tuple(positions.shape)} and cos_sin {tuple(cos_sin.shape)}"
        raise ValueError(f"{shapes} do not fit q {tuple(q.shape)}")
    return backends.module("rope", q.device.type).apply_rope(q, k, positions, cos_sin)
