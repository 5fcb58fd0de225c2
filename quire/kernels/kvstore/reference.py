"""Page writes in plain torch: the oracle. Results are exact copies, so no tolerance."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, cells: torch.Tensor
) -> None:
    """Indexed assignment; of equal cells an unspecified one wins (only the dummy page has such)."""
    pages, offsets = cells // k_pages.shape[2], cells % k_pages.shape[2]
    k_pages[pages, :, offsets] = k
    v_pages[pages, :, offsets] = v


def copy_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    n_tokens: Sequence[int],
) -> None:
    """One slice assignment a copy."""
    for source, target, count in zip(sources, targets, n_tokens, strict=True):
        k_pages[target, :, :count] = k_pages[source, :, :count]
        v_pages[target, :, :count] = v_pages[source, :, :count]
