"""The Triton kernels on a real GPU, but for attention: against float64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import act, kvstore, norm
from quire.kernels.act import reference as act_reference
from quire.kernels.kvstore import reference as kvstore_reference
from quire.kernels.norm import reference as norm_reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "h"), [(1, 4096), (300, 1024), (64, 2880)])
def test_norm_and_activation(dtype: torch.dtype, n: int, h: int) -> None:
    x, residual = (torch.randn(n, h, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(h, device="cuda").to(dtype)
    expected = norm_reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert relative_error(norm.rms_norm(x, weight, 1e-5), expected) <= norm_reference.TOLERANCE[dtype]
    total = x + residual
    normed, new_residual = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, total)
    expected = norm_reference.rms_norm(total.double(), weight.double(), 1e-5)
    assert relative_error(normed, expected) <= norm_reference.TOLERANCE[dtype]
    gate_up = torch.randn(n, 2 * h, device="cuda").to(dtype) * 3
    expected = act_reference.silu_mul(gate_up.double())
    assert relative_error(act.silu_mul(gate_up), expected) <= act_reference.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "d"), [(8, 128), (3, 80)])
def test_copies_of_pages(dtype: torch.dtype, heads: int, d: int) -> None:
    pools = [torch.randn(12, heads, 16, d, device="cuda").to(dtype) for _ in range(2)]
    wanted = [pool.clone() for pool in pools]
    kvstore.copy_pages(*pools, [1, 3], [2, 4], [16, 3])
    kvstore_reference.copy_pages(*wanted, [1, 3], [2, 4], [16, 3])
    assert all(torch.equal(got, right) for got, right in zip(pools, wanted, strict=True))
