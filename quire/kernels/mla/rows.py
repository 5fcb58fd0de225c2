"""What queries ask of lines, and values of what is seen, in Triton: where rows are to be alone."""

from __future__ import annotations

import torch

from quire.kernels.catalog import unless_alone
from quire.kernels.gemm.rows_kernel import multiply
from quire.kernels.mla.triton import store


def obstacle(*_: object) -> str | None:
    """Why this is not for such rows, or None."""
    return unless_alone()


def ask(
    lines: torch.Tensor, norm: torch.Tensor, eps: float, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """See op.py."""
    plain, rank = keys.shape[1:]
    asked = q.new_empty(*q.shape[:2], lines.shape[1])
    multiply(q[:, :, :plain], keys.mT, asked[:, :, :rank])
    store(lines, norm, eps, q[:, :, plain:], asked[:, :, rank:], positions, cos_sin, pages, cache_locs)
    return asked


def values(seen: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    return multiply(seen, matrices, seen.new_empty(*seen.shape[:2], matrices.shape[1]))
