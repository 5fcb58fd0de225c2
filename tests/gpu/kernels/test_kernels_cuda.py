"""Copies of pages on a real GPU."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import kvstore
from quire.kernels.kvstore import reference as kvstore_reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "d"), [(8, 128), (3, 80), (1, 2048)])
def test_copies_of_pages(dtype: torch.dtype, heads: int, d: int) -> None:
    pools = [torch.randn(12, heads, 16, d, device="cuda").to(dtype) for _ in range(2)]
    wanted = [pool.clone() for pool in pools]
    kvstore.copy_pages(*pools, [1, 3], [2, 4], [16, 3])
    kvstore_reference.copy_pages(*wanted, [1, 3], [2, 4], [16, 3])
    assert all(torch.equal(got, right) for got, right in zip(pools, wanted, strict=True))
