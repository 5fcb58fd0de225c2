"""RMS norm on a real GPU, every implementation: against float64, with rows alone, and which one runs."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from quire.kernels import catalog, norm
from quire.kernels.norm import reference
from quire.kernels.selector import select

pytestmark = pytest.mark.gpu

needs_hopper = pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle()))
SIZES = [(1, 4096), (300, 1024), (64, 2880), (3, 8), (17, 2056), (5, 8192), (2, 16384), (70_000, 64)]


@pytest.fixture(params=["hopper", "triton"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "hopper" and catalog.hopper_obstacle():
        pytest.skip(str(catalog.hopper_obstacle()))
    return importlib.import_module(f"quire.kernels.norm.{request.param}")


def randn(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*size, device="cuda").to(dtype)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "h"), SIZES)
def test_matches_float64(module: ModuleType, dtype: torch.dtype, n: int, h: int) -> None:
    x, residual, weight = randn(n, h, dtype=dtype), randn(n, h, dtype=dtype), randn(h, dtype=dtype)
    got = module.rms_norm(x, weight, 1e-5)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert error(got, expected) <= reference.TOLERANCE[dtype]
    assert int((got != reference.rms_norm(x, weight, 1e-5)).sum()) <= max(1, n * h // 100)
    total = x + residual
    normed, summed = module.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total) and torch.equal(normed, module.rms_norm(total, weight, 1e-5))


def test_matches_float64_in_float32() -> None:
    x, weight = randn(30, 1000, dtype=torch.float32), randn(1000, dtype=torch.float32)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert error(norm.rms_norm(x, weight, 1e-5), expected) <= reference.TOLERANCE[torch.float32]


def test_rows_and_heads_of_a_larger_tensor(module: ModuleType) -> None:
    wide, weight = randn(33, 6, 144, dtype=torch.bfloat16), randn(128, dtype=torch.bfloat16)
    heads = wide[:, 1:4, 8:136]
    expected = reference.rms_norm(heads.double(), weight.double(), 1e-6)
    assert error(module.rms_norm(heads, weight, 1e-6), expected) <= reference.TOLERANCE[torch.bfloat16]
    assert torch.equal(module.rms_norm(heads[:, 1], weight, 1e-6), module.rms_norm(heads, weight, 1e-6)[:, 1])


@pytest.mark.parametrize("h", [1024, 4096, 5120])
def test_a_row_does_not_depend_on_the_others(module: ModuleType, h: int) -> None:
    x, weight = randn(700, h, dtype=torch.bfloat16), randn(h, dtype=torch.bfloat16)
    together = module.rms_norm(x, weight, 1e-5)
    for i in (0, 1, 131, 699):
        assert torch.equal(module.rms_norm(x[i : i + 1], weight, 1e-5), together[i : i + 1])


@needs_hopper
def test_which_implementation_runs() -> None:
    def name(x: torch.Tensor, weight: torch.Tensor) -> str:
        return select("norm", "rms_norm", x, weight).__module__.rpartition(".")[2]

    x, weight = randn(4, 264, dtype=torch.bfloat16), randn(256, dtype=torch.bfloat16)
    assert name(x[:, 8:], weight) == "hopper" and name(x[:0, :256], weight) == "hopper"
    assert name(x[:, 4:260], weight) == "triton", "address"
    assert name(x[:, :252], weight[:252].clone()) == "triton", "size"
    assert name(x[:, :256].float(), weight.float()) == "triton", "type"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "h"), [(1, 768), (300, 1024), (3, 8), (17, 2056), (2, 16384)])
def test_layer_norm_matches_float64(dtype: torch.dtype, n: int, h: int) -> None:
    x, weight, bias = randn(n, h, dtype=dtype) * 3 + 1, randn(h, dtype=dtype), randn(h, dtype=dtype)
    expected = reference.layer_norm(x.double(), weight.double(), bias.double(), 1e-5)
    assert error(norm.layer_norm(x, weight, bias, 1e-5), expected) <= reference.TOLERANCE[dtype]
    bare = reference.layer_norm(x.double(), None, None, 1e-5)
    assert error(norm.layer_norm(x, None, None, 1e-5), bare) <= reference.TOLERANCE[dtype]
    heads, of_heads = randn(n, 6, 128, dtype=dtype), randn(6, 128, dtype=dtype)
    expected = reference.layer_norm(heads.double(), of_heads.double(), None, 1e-5)
    assert error(norm.layer_norm(heads, of_heads, None, 1e-5), expected) <= reference.TOLERANCE[dtype]
