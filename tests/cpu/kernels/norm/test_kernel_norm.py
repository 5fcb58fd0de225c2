"""RMS norm: against float64, against transformers, and row by row bitwise."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.kernels import norm
from quire.kernels.norm import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [(1, 1), (3, 7), (5, 64), (900, 100), (2, 1027)]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(level: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for n, h in SIZES:
        x, residual = (torch.randn(n, h, generator=generator, dtype=torch.float64).mul(3).to(dtype) for _ in range(2))
        weight = torch.randn(h, generator=generator, dtype=torch.float64).to(dtype)
        expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
        assert relative_error(norm.rms_norm(x, weight, 1e-5), expected) <= reference.TOLERANCE[dtype], (n, h)
        total = x + residual
        expected = reference.rms_norm(total.double(), weight.double(), 1e-5)
        normed, new_residual = norm.add_rms_norm(x, residual.clone(), weight, 1e-5)
        assert torch.equal(new_residual, total)
        assert relative_error(normed, expected) <= reference.TOLERANCE[dtype], (n, h)


def test_heads_of_a_fused_projection(level: str) -> None:
    """[n, heads, d] slices normalise each head; the other columns are left alone."""
    fused = torch.randn(9, 700, dtype=torch.bfloat16)
    heads, weight = fused[:, 30:350].unflatten(1, (5, 64)), torch.randn(64).bfloat16()
    got = norm.rms_norm(heads, weight, 1e-6)
    assert got.shape == (9, 5, 64)
    assert torch.equal(got, norm.rms_norm(heads.reshape(45, 64), weight, 1e-6).view(9, 5, 64))


def test_matches_transformers(level: str) -> None:
    x = torch.randn(17, 96).bfloat16()
    theirs = LlamaRMSNorm(96, eps=1e-5).to(torch.bfloat16)
    theirs.weight.data.normal_()
    theirs.requires_grad_(False)
    got = norm.rms_norm(x, theirs.weight, 1e-5)
    assert relative_error(got, theirs(x).double()) <= 2**-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_matches_torch(level: str, dtype: torch.dtype) -> None:
    for n, h in SIZES:
        x = torch.randn(n, 2 * h).mul(3).add(1).to(dtype)[:, :h]
        weight, bias = torch.randn(h).to(dtype), torch.randn(h).to(dtype)
        for tables in ((weight, bias), (weight, None), (None, None)):
            wide = [None if table is None else table.double() for table in tables]
            expected = torch.nn.functional.layer_norm(x.double(), (h,), *wide, 1e-5)
            assert relative_error(norm.layer_norm(x, *tables, 1e-5), expected) <= reference.TOLERANCE[dtype], (n, h)
            assert relative_error(reference.layer_norm(x.double(), *wide, 1e-5), expected) <= 1e-11


def test_layer_norm_with_weights_of_each_head(level: str) -> None:
    heads, weight = torch.randn(9, 5, 64), torch.randn(5, 64)
    got = norm.layer_norm(heads, weight, None, 1e-6)
    plain = norm.layer_norm(heads, None, None, 1e-6)
    assert torch.allclose(got, plain * weight, atol=1e-6) and got.shape == heads.shape


def test_rows_are_independent(level: str) -> None:
    x, weight = torch.randn(100, 333), torch.randn(333)
    whole = norm.rms_norm(x, weight, 1e-5)
    assert all(torch.equal(norm.rms_norm(x[i : i + 1], weight, 1e-5), whole[i : i + 1]) for i in (0, 41, 99))


def test_mismatches_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        norm.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match=r"bias .* does not fit"):
        norm.layer_norm(torch.zeros(2, 8), torch.zeros(8), torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="alike"):
        norm.add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), 1e-5)
