"""Lines of latent attention in plain torch: the oracle. Float32, or float64 for float64 inputs."""

from __future__ import annotations

import torch

from quire.kernels.norm import reference as norms
from quire.kernels.qkv.reference import rotate

TOLERANCE = {torch.float64: 2e-12, torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}
"""dtype → largest |kernel - float64 reference| / (1 + largest |reference| of its line): three roundings."""


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
    rank, page_size = len(norm), pages.shape[2]
    rotated.copy_(rotate(q, positions, cos_sin))
    at, offsets = cache_locs // page_size, cache_locs % page_size
    pages[at, 0, offsets, :rank] = norms.rms_norm(lines[:, :rank], norm, eps)
    pages[at, 0, offsets, rank:] = rotate(lines[:, None, rank:], positions, cos_sin)[:, 0]


def ask(
    lines: torch.Tensor, norm: torch.Tensor, eps: float, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """See op.py. Sums in float64."""
    plain, rank = keys.shape[1:]
    asked = q.new_empty(*q.shape[:2], lines.shape[1])
    asked[:, :, :rank] = torch.einsum("nhd,hdr->nhr", q[:, :, :plain].double(), keys.double())
    store(lines, norm, eps, q[:, :, plain:], asked[:, :, rank:], positions, cos_sin, pages, cache_locs)
    return asked


def values(seen: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """See op.py. Sums in float64."""
    return torch.einsum("nhr,hvr->nhv", seen.double(), matrices.double()).to(seen.dtype).contiguous()
