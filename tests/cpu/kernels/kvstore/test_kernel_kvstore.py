"""Page writes are exact, touch nothing else, and take slices of a fused projection."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import kvstore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16, 128])
def test_store(level: str, dtype: torch.dtype, page_size: int) -> None:
    n, heads, d, n_pages = 90, 3, 24, 256 // page_size + 4
    fused = torch.randn(n, 2 * heads * d + 5).to(dtype)
    k, v = fused[:, : heads * d].unflatten(1, (heads, d)), fused[:, heads * d : 2 * heads * d].unflatten(1, (heads, d))
    k_pages, v_pages = (torch.full((n_pages, heads, page_size, d), 7.0, dtype=dtype) for _ in range(2))
    cells = torch.randperm(n_pages * page_size)[:n]
    kvstore.store_kv(k, v, k_pages, v_pages, cells)
    for pages, rows in ((k_pages, k), (v_pages, v)):
        by_cell = pages.transpose(1, 2).reshape(-1, heads, d)
        assert torch.equal(by_cell[cells], rows)
        others = torch.ones(len(by_cell), dtype=torch.bool)
        others[cells] = False
        assert bool((by_cell[others] == 7.0).all())


def test_copy_pages(level: str) -> None:
    k_pages, v_pages = torch.randn(6, 2, 8, 4), torch.randn(6, 2, 8, 4)
    k_before, v_before = k_pages.clone(), v_pages.clone()
    kvstore.copy_pages(k_pages, v_pages, [1, 5], [3, 2], [8, 3])
    for after, before in ((k_pages, k_before), (v_pages, v_before)):
        assert torch.equal(after[3], before[1])
        assert torch.equal(after[2, :, :3], before[5, :, :3])
        assert torch.equal(after[2, :, 3:], before[2, :, 3:])
        assert torch.equal(after[[0, 1, 4, 5]], before[[0, 1, 4, 5]])
    kvstore.copy_pages(k_pages, v_pages, [], [], [])


def test_mismatches_are_refused() -> None:
    pages, rows = torch.zeros(2, 1, 4, 8), torch.zeros(3, 1, 8)
    with pytest.raises(ValueError, match="do not fit"):
        kvstore.store_kv(rows, rows, pages, pages, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="dtype"):
        kvstore.store_kv(rows.half(), rows.half(), pages, pages, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="must match"):
        kvstore.copy_pages(pages, pages, [1], [0, 1], [1])
