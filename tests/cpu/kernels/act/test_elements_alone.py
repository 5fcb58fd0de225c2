"""Functions of elements on a CPU for rows that are alone: no bit depends on where an element lies in an array."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import native
from quire.kernels.act import activate, elements, reference, sigmoid
from quire.kernels.invariance import rows_alone

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the compiled CPU kernels")


def test_sigmoids_are_right_and_alone() -> None:
    wide = torch.randn(300, 20, generator=torch.Generator().manual_seed(0)) * 4
    for dtype, tolerance in ((torch.float32, 4e-7), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
        x = wide.to(dtype)[:, 3:]
        with rows_alone():
            y = sigmoid(x)
            rows = torch.cat([sigmoid(x[i : i + 1]) for i in range(len(x))])
        assert (y.double() - x.double().sigmoid()).abs().max() <= tolerance
        assert torch.equal(y, rows) and y.dtype is dtype
    each = torch.cat([torch.sigmoid(wide[i : i + 1]) for i in range(len(wide))])
    assert not torch.equal(each, torch.sigmoid(wide)), "torch's own do depend on it: else there is no need for these"


def test_what_decays_are_made_of() -> None:
    x = torch.tensor([[-200.0, -30.0, -1e-3, 0.0, 3.0, 19.9, 20.1, 300.0]])
    torch.testing.assert_close(elements.softplus(x).double(), torch.nn.functional.softplus(x.double()))
    y = x.clamp(max=80)
    torch.testing.assert_close(elements.exp(y).double(), y.double().exp(), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize(("activation", "gated"), [("silu", False), ("gelu_tanh", False), ("gelu_tanh", True)])
def test_activations_are_right_and_alone(activation: str, gated: bool) -> None:
    wide = torch.randn(90, 2 * 37, generator=torch.Generator().manual_seed(1)) * 3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = wide.to(dtype)
        expected = reference.activate(x.double(), activation, gated)
        with rows_alone():
            y = activate(x, activation, gated=gated)
            rows = torch.cat([activate(x[i : i + 1], activation, gated=gated) for i in range(len(x))])
        assert float(((y.double() - expected).abs() / (1 + expected.abs())).max()) <= reference.TOLERANCE[dtype]
        assert torch.equal(y, rows)
