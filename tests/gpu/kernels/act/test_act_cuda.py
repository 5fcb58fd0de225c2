"""Gated activation on a real GPU, every implementation: against float64, extreme values, rows alone."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from quire.kernels import act, catalog
from quire.kernels.act import reference

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["hopper", "triton"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "hopper" and catalog.hopper_obstacle():
        pytest.skip(str(catalog.hopper_obstacle()))
    return importlib.import_module(f"quire.kernels.act.{request.param}")


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "f"), [(1, 8), (1, 14336), (64, 3072), (300, 1032), (70_000, 16)])
def test_matches_float64(module: ModuleType, dtype: torch.dtype, n: int, f: int) -> None:
    x = (torch.randn(n, 2 * f + 8, device="cuda") * 3).to(dtype)[:, 8:]
    got = module.silu_mul(x)
    assert error(got, reference.silu_mul(x.double())) <= reference.TOLERANCE[dtype]
    assert float((got == reference.silu_mul(x)).double().mean()) > 0.99
    assert torch.equal(module.silu_mul(x[-1:]), got[-1:])


def test_matches_float64_in_float32() -> None:
    x = torch.randn(30, 200, device="cuda")
    assert error(act.silu_mul(x), reference.silu_mul(x.double())) <= reference.TOLERANCE[torch.float32]


def test_extreme_gates(module: ModuleType) -> None:
    gate = torch.tensor([-3e38, -1e4, -100.0, -88.0, 0.0, 88.0, 1e4, 3e38], device="cuda").bfloat16()
    got = module.silu_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    assert error(got, reference.silu_mul(torch.cat((gate, torch.ones_like(gate))).double().unsqueeze(0))[0]) <= 1.6e-2


@pytest.mark.parametrize("activation", act.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations_match_float64(dtype: torch.dtype, activation: str) -> None:
    x = (torch.randn(33, 2 * 1100, device="cuda") * 3).to(dtype)
    for gated in (True, False):
        got = act.activate(x, activation, gated=gated)
        assert error(got, reference.activate(x.double(), activation, gated)) <= reference.TOLERANCE[dtype]
