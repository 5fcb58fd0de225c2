"""Copies of pages in plain torch: the oracle. Results are exact copies, so no tolerance."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
