"""Linear layers in MXFP4 on a real GPU: against float64."""

from __future__ import annotations

import pytest
import quantised_case as case
import torch

from quire.kernels import mxfp4
from quire.kernels.mxfp4 import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_matches_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for n, k in ((256, 2880), (38, 136)):
        weight = case.fp4(n, k, "cuda")
        for m in (1, 7, 16, 17, 64, 257):
            x = case.rows(m, k, dtype, "cuda")
            for around in case.arounds(m, n, k, x):
                bias, norm, residual, silu_mul, out = around.own().arguments
                got = mxfp4.linear(x, weight, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)
                expected = reference.linear(x, weight, *around.own().arguments)
                assert case.error(got, expected) <= reference.TOLERANCE[dtype], (n, k, m)
