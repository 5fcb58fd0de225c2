"""Lines of latent attention on the CPU: the norm's own kernel, and one copy of whole lines into their entries."""

from __future__ import annotations

import torch

from quire.kernels.norm import rms_norm


def store(
    lines: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    q: torch.Tensor,
    rotated: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pages: torch.Tensor,
    cache_locs: torch.Tensor,
) -> None:
    """See op.py."""
    rank = len(norm)
    cos, sin = cos_sin.index_select(0, positions).chunk(2, dim=1)
    made = torch.empty(lines.shape, dtype=lines.dtype)
    made[:, :rank] = rms_norm(lines[:, :rank], norm, eps)
    _rotate(lines[:, rank:], made[:, rank:], cos, sin)
    _rotate(q, rotated, cos[:, None], sin[:, None])
    pages.view(-1, pages.shape[3]).index_copy_(0, cache_locs, made)


def _rotate(x: torch.Tensor, to: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half:].float()
    turned = first * cos - second * sin, second * cos + first * sin  # both, as `to` may be x
    to[..., :half], to[..., half:] = turned
