"""Gated activation: against float64 and torch's own silu, extremes included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels import act
from quire.kernels.act import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_matches_float64(level: str, dtype: torch.dtype) -> None:
    for n, f in ((1, 1), (3, 37), (700, 64), (2, 1030)):
        x = (torch.randn(n, 2 * f, dtype=torch.float64) * 4).to(dtype)
        expected = F.silu(x[:, :f].double()) * x[:, f:].double()
        got = act.silu_mul(x)
        assert got.shape == (n, f)
        error = ((got.double() - expected).abs() / (1 + expected.abs())).max()
        assert float(error) <= reference.TOLERANCE[dtype], (n, f)


PEERS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


@pytest.mark.parametrize("activation", act.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_activations_match_torch_in_float64(level: str, dtype: torch.dtype, activation: str) -> None:
    x = (torch.randn(7, 2 * 70, dtype=torch.float64) * 3).to(dtype)
    for gated in (True, False):
        wide = x.double()
        expected = PEERS[activation](wide[:, :70]) * wide[:, 70:] if gated else PEERS[activation](wide)
        got = act.activate(x, activation, gated=gated)
        assert float(((got.double() - expected).abs() / (1 + expected.abs())).max()) <= reference.TOLERANCE[dtype]
        assert torch.allclose(reference.activate(wide, activation, gated), expected, rtol=1e-12, atol=1e-12)


def test_extremes(level: str) -> None:
    """Large negative gates give 0, large positive ones themselves; NaN and infinity pass."""
    gate = torch.tensor([[-3e38, -200.0, 200.0, 2.0**100, float("inf"), float("nan")]])
    got = act.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))[0]
    assert got[:5].tolist() == pytest.approx([0.0, 0.0, 200.0, 2.0**100, float("inf")], abs=1e-6)
    assert bool(got[5].isnan())


def test_mismatches_are_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        act.silu_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="'swish' must be one of silu"):
        act.activate(torch.zeros(2, 8), "swish", gated=False)
