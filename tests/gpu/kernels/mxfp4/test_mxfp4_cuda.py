"""Linear layers in MXFP4 and NVFP4 on a real GPU: against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import quantised_case as case
import torch

from quire.kernels import mxfp4
from quire.kernels.mxfp4 import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [case.fp4, case.nvfp4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_matches_float64(dtype: torch.dtype, make: Callable[[int, int, str], mxfp4.Fp4Weight]) -> None:
    torch.manual_seed(0)
    for n, k in ((256, 2880), (38, 136)):
        weight = make(n, k, "cuda")
        for m in (1, 7, 16, 17, 64, 257):
            x = case.rows(m, k, dtype, "cuda")
            for around in case.arounds(m, n, k, x):
                bias, norm, residual, silu_mul, out = around.own().arguments
                got = mxfp4.linear(x, weight, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)
                expected = reference.linear(x, weight, *around.own().arguments)
                assert case.error(got, expected) <= reference.TOLERANCE[dtype], (n, k, m)


def test_large_activations_do_not_overflow_in_nvfp4() -> None:
    """Numbers are below 1 until sums are multiplied by factors: 2688 times this x is beyond bfloat16."""
    weight = mxfp4.pack(
        torch.full((64, 64), 0x77, dtype=torch.uint8, device="cuda"),
        torch.full((64, 8), 126, dtype=torch.uint8, device="cuda"),
        torch.full((64,), 2.0**-20, device="cuda"),
    )
    x = torch.full((3, 128), 1e36, dtype=torch.bfloat16, device="cuda")
    got = mxfp4.linear(x, weight)
    assert torch.equal(got, reference.linear(x, weight, None, None, None, False)) and bool(got.isfinite().all())
