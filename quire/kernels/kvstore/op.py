"""Public copies of pages. Checks shapes and picks the implementation by device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.kvstore import entry
from quire.kernels.selector import select


def copy_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    n_tokens: Sequence[int],
) -> None:
    """Copy the first n_tokens[i] entries of page sources[i] to page targets[i], for keys and values (copy on write).

    k_pages, v_pages: [n_pages, n_kv_heads, page_size, entry], of any type; what an entry is: entry.py.

    The three lists have equal length; no target may be a source or appear twice.
    """
    _check_pages(k_pages, v_pages)
    if not len(sources) == len(targets) == len(n_tokens):
        raise ValueError(f"{len(sources)} sources, {len(targets)} targets and {len(n_tokens)} counts must match")
    if len(sources):
        k_pages, v_pages = entry.movable(k_pages), entry.movable(v_pages)
        select("kvstore", "copy_pages", k_pages)(k_pages, v_pages, sources, targets, n_tokens)


def _check_pages(k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    if k_pages.dim() != 4 or k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(f"k_pages {_shape(k_pages)} and v_pages {_shape(v_pages)} must be equal 4-d pools")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k_pages and v_pages must be contiguous")


def _shape(pages: torch.Tensor) -> str:
    return f"{tuple(pages.shape)} {pages.dtype}"
