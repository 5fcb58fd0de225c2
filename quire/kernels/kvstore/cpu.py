"""Page writes on CPU: the native library for storing; copies of pages are rare and stay slice assignments."""

from __future__ import annotations

import torch

from quire.kernels import native
from quire.kernels.kvstore import reference
from quire.kernels.kvstore.reference import copy_pages

__all__ = ["copy_pages", "store_kv"]


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, cells: torch.Tensor
) -> None:
    """See op.py."""
    library = native.library()
    if library is None or cells.dtype != torch.int64 or not cells.is_contiguous():
        reference.store_kv(k, v, k_pages, v_pages, cells)
        return
    _, n_kv_heads, page_size, head_dim = k_pages.shape
    library.quire_store_kv(
        k.element_size(), k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1),
        k_pages.data_ptr(), v_pages.data_ptr(), cells.data_ptr(), k.shape[0], n_kv_heads, page_size, head_dim,
        torch.get_num_threads(),
    )  # fmt: skip
