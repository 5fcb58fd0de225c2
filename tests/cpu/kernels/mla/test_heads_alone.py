"""Latent attention's products of each head on a CPU for rows that are alone: right, and no bit says with how many."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import native
from quire.kernels.invariance import rows_alone
from quire.kernels.mla import ask, reference, values

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the compiled CPU kernels")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("plain", "rank", "v"), [(24, 32, 20), (33, 200, 7)])
def test_products_of_heads(dtype: torch.dtype, plain: int, rank: int, v: int) -> None:
    torch.manual_seed(0)
    n, heads, d = 11, 3, 8
    made = torch.randn(heads, plain + v, rank, dtype=torch.float64)
    q, lines = torch.randn(n, heads, plain + d, dtype=torch.float64), torch.randn(n, rank + d, dtype=torch.float64)
    norm, table = torch.rand(rank, dtype=torch.float64) + 0.5, torch.randn(32, d)
    positions, locs = torch.arange(n) * 2, torch.arange(n) + 8
    found = []
    for kind in (torch.float64, dtype):
        keys, matrices = made.to(kind)[:, :plain], made.to(kind)[:, plain:]
        pages = torch.zeros(4, 1, 8, rank + d, dtype=kind)

        def asked(
            rows: slice, kind: torch.dtype = kind, keys: torch.Tensor = keys, pages: torch.Tensor = pages
        ) -> torch.Tensor:
            given = lines.to(kind)[rows], norm.to(kind), 1e-5, q.to(kind)[rows], keys, positions[rows], table, pages
            return ask(*given, locs[rows])

        if kind is torch.float64:
            given = lines, norm, 1e-5, q, keys, positions, table, pages, locs
            first = reference.ask(*given)
            found += [first, reference.values(first[:, :, :rank], matrices)]
            continue
        with rows_alone():
            got = asked(slice(None))
            seen = found[0][:, :, :rank].to(kind)
            y = values(seen, matrices)
            for result, expected in ((got, found[0]), (y, found[1])):
                error = (result.double() - expected).abs().max() / (1 + expected.abs().max())
                assert error <= reference.TOLERANCE[dtype]
            for rows in (slice(0, 1), slice(3, 6), slice(9, 11)):
                assert torch.equal(asked(rows), got[rows])
                assert torch.equal(values(seen[rows], matrices), y[rows])
