"""The Triton kernels on a real GPU, but for attention: against float64."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import act, kvstore, norm, rope
from quire.kernels.act import reference as act_reference
from quire.kernels.kvstore import reference as kvstore_reference
from quire.kernels.norm import reference as norm_reference
from quire.kernels.rope import reference as rope_reference

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
@pytest.mark.parametrize(("hq", "hk", "d", "rotary"), [(32, 8, 128, 128), (16, 8, 64, 64), (12, 4, 80, 20)])
def test_qk_norm_rope_and_store(dtype: torch.dtype, hq: int, hk: int, d: int, rotary: int) -> None:
    fused = torch.randn(77, (hq + 2 * hk) * d, device="cuda").to(dtype)
    q, k, v = (part.unflatten(1, (-1, d)) for part in fused.split([hq * d, hk * d, hk * d], dim=1))
    weight = torch.randn(d, device="cuda").to(dtype)
    expected = norm_reference.rms_norm(q.double(), weight.double(), 1e-6)
    assert relative_error(norm.rms_norm(q, weight, 1e-6), expected) <= norm_reference.TOLERANCE[dtype]
    positions, cos_sin = torch.randint(0, 900, (77,), device="cuda"), torch.randn(900, rotary, device="cuda")
    expected = rope_reference.apply_rope(q.double(), k.double(), positions, cos_sin.double())
    rotated = rope.apply_rope(q, k, positions, cos_sin)
    for got, right in zip(rotated, expected, strict=True):
        assert relative_error(got, right) <= rope_reference.TOLERANCE[dtype]
    pools = [torch.zeros(12, hk, 16, d, device="cuda", dtype=dtype) for _ in range(2)]
    wanted = [pool.clone() for pool in pools]
    cells = torch.randperm(12 * 16, device="cuda")[:77]
    kvstore.store_kv(rotated[1], v, *pools, cells)
    kvstore_reference.store_kv(rotated[1], v, *wanted, cells)
    kvstore.copy_pages(*pools, [1, 3], [2, 4], [16, 3])
    kvstore_reference.copy_pages(*wanted, [1, 3], [2, 4], [16, 3])
    assert all(torch.equal(got, right) for got, right in zip(pools, wanted, strict=True))
