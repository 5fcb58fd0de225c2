"""Arguments of `experts_with_shared`, and what its implementations are compared with."""

from __future__ import annotations

import torch

from quire.kernels.moe import reference

SHAPES = (  # tokens, chosen, experts, hidden, inner, parts of the shared one
    (1, 2, 3, 576, 192, 2),
    (1, 3, 8, 320, 64, 1),
    (3, 2, 5, 320, 192, 2),
    (4, 5, 9, 192, 64, 3),
    (8, 5, 9, 192, 64, 2),
)
MANY = (
    (1, 6, 64, 2048, 1408, 2),
    (2, 6, 64, 2048, 1408, 2),
    (8, 6, 64, 2048, 1408, 2),
    (8, 8, 32, 512, 256, 1),
)
"""Those that take an emulation too long."""


def arguments(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """x, ids (some of which are none), weights, matrices of experts and of the shared one, residual."""
    n, k, n_experts, hidden, inner, parts = shape
    sizes = ((n, hidden), (n_experts, 2 * inner, hidden), (n_experts, hidden, inner))
    sizes += ((2 * parts * inner, hidden), (hidden, parts * inner), (n, hidden))
    x, up, down, shared_up, shared_down, residual = (
        (torch.randn(size) * (size[-1] ** -0.5 if i not in (0, 5) else 1)).to(device, dtype)
        for i, size in enumerate(sizes)
    )
    ids = torch.rand(n, n_experts).argsort(1)[:, :k].int()
    weights = torch.rand(n, k)
    if n > 1:
        ids[n // 2, 0], weights[n // 2, 0] = -1, torch.nan
    ids, weights = ids.contiguous().to(device), weights.to(device)
    return [x, ids, weights, up, down, shared_up, shared_down, residual]


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
    """In float64, without a residual."""
    wide = (one.double() for one in matrices)
    return reference.experts_with_shared(x.double(), ids, weights.double(), *wide, torch.zeros_like(x.double()))
