"""Copies of pages are exact and touch nothing else."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import kvstore


def test_copy_pages() -> None:
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
    pages = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match="must match"):
        kvstore.copy_pages(pages, pages, [1], [0, 1], [1])
    with pytest.raises(ValueError, match="equal 4-d pools"):
        kvstore.copy_pages(pages, pages.half(), [1], [0], [1])
