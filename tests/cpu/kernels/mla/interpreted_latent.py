"""Run by `test_kernel_mla.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import types

import numpy as np
import quick_interpreter  # noqa: F401
import torch
from latent_case import Latent, attend, check_store

from quire.kernels.attention import reference
from quire.kernels.attention.triton import latent
from quire.kernels.gemm import rows as products
from quire.kernels.mla import reference as latent_reference
from quire.kernels.mla import rows
from quire.kernels.mla import triton as mla

CASES = (
    Latent([(130, 1), (9, 1), (1, 1), (300, 1)], seed=1),
    Latent([(130, 1), (9, 9), (150, 3), (60, 30)], n_heads=3, rank=24, rope=8, page_size=7, seed=2),
    Latent([(200, 1), (17, 5)], n_heads=20, rank=32, rope=4, seed=3),
    Latent([(170, 2), (160, 1), (165, 1)], n_shared=128, seed=4),
    Latent([(70, 1), (40, 2)], n_heads=16, dtype=torch.float16, page_size=48, seed=5),
    Latent([(64, 1), (33, 2)], n_heads=128, seed=6),
)



def check_rows(dtype: torch.dtype) -> None:
    """What stands around attention, and a linear layer, for rows that are alone: right, and the same bits in any
    number of rows."""
    torch.manual_seed(0)
    n, heads, plain, d, rank, v = 70, 3, 20, 8, 72, 12
    made = torch.randn(heads, plain + v, rank).to(dtype)
    q, lines = torch.randn(n, heads, plain + d).to(dtype), torch.randn(n, rank + d).to(dtype)
    norm, table, positions = torch.rand(rank).to(dtype) + 0.5, torch.randn(n, d), torch.arange(n)
    pages = torch.zeros(10, 1, 8, rank + d, dtype=dtype)

    def asked(some: slice, module: types.ModuleType = rows) -> torch.Tensor:
        given = lines[some], norm, 1e-5, q[some], made[:, :plain], positions[some], table, pages, positions[some] + 8
        return module.ask(*given)

    whole, seen = asked(slice(None)), torch.randn(n, heads, rank).to(dtype)
    y, expected = rows.values(seen, made[:, plain:]), latent_reference.values(seen, made[:, plain:])
    for got, wanted in ((whole, asked(slice(None), latent_reference)), (y, expected)):
        error = (got.double() - wanted.double()).abs().max() / (1 + wanted.double().abs().max())
        assert error <= latent_reference.TOLERANCE[dtype], (dtype, error)
    for some in (slice(0, 1), slice(0, 20), slice(64, 70)):  # where they stand in a tile, numpy may sum otherwise
        assert torch.equal(asked(some), whole[some])
        assert torch.equal(rows.values(seen[some], made[:, plain:]), y[some])
    x, gate = lines, torch.randn(1, rank + d).to(dtype)
    got = products.linear(x, gate, None, None, None, False, None)
    torch.testing.assert_close(got, (x.double() @ gate.double().T).to(dtype), rtol=2e-3, atol=2e-3)
    assert torch.equal(products.linear(x[:6], gate, None, None, None, False, None), got[:6])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):
        for case in CASES:
            for n_ctas in (2, 7):
                attend(case, latent.run, reference.TOLERANCE[case.dtype], n_ctas)
        for dtype in (torch.float32, torch.float16):
            check_store(mla.store, dtype)
        for dtype in (torch.float32, torch.float16):
            check_rows(dtype)
        check_store(mla.store, torch.float32, n=3, n_heads=17, rank=24, d=4)
    print("fine")
