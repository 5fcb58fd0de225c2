"""Public page writes. Checks shapes and picks the implementation by device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels import backends


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, cells: torch.Tensor
) -> None:
    """Write the keys and values of n tokens into their cells.

    k, v: [n, n_kv_heads, head_dim], last dimension contiguous. k_pages, v_pages: [n_pages, n_kv_heads, page_size,
    head_dim], contiguous, same dtype. cells: [n] int64, page * page_size + offset; distinct except in the dummy
    page 0. Cells are not range-checked. Raises ValueError on a mismatch of shapes.
    """
    _check_pages(k_pages, v_pages)
    if k.shape != v.shape or k.shape[1:] != (k_pages.shape[1], k_pages.shape[3]) or cells.shape != k.shape[:1]:
        shapes = f"k {tuple(k.shape)}, v {tuple(v.shape)}, cells {tuple(cells.shape)}"
        raise ValueError(f"{shapes} do not fit pages {_shape(k_pages)}")
    if k.dtype != k_pages.dtype or v.dtype != k_pages.dtype or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError(f"k and v must have dtype {k_pages.dtype} and a contiguous last dimension")
    backends.module("kvstore", k.device.type).store_kv(k, v, k_pages, v_pages, cells)


def copy_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    n_tokens: Sequence[int],
) -> None:
    """Copy the first n_tokens[i] cells of page sources[i] to page targets[i], for keys and values (copy on write).

    The three lists have equal length; no target may be a source or appear twice.
    """
    _check_pages(k_pages, v_pages)
    if not len(sources) == len(targets) == len(n_tokens):
        raise ValueError(f"{len(sources)} sources, {len(targets)} targets and {len(n_tokens)} counts must match")
    if len(sources):
        backends.module("kvstore", k_pages.device.type).copy_pages(k_pages, v_pages, sources, targets, n_tokens)


def _check_pages(k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    if k_pages.dim() != 4 or k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(f"k_pages {_shape(k_pages)} and v_pages {_shape(v_pages)} must be equal 4-d pools")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k_pages and v_pages must be contiguous")


def _shape(pages: torch.Tensor) -> str:
    return f"{tuple(pages.shape)} {pages.dtype}"
