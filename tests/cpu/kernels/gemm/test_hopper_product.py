"""What a compiled product is called with, read from its arguments: on tensors of the CPU, through a Python function."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.kernels.gemm.hopper_product import Args, CompiledProduct, WideArgs, lies_wrong
from quire.kernels.gemm.plan import Plan
from quire.kernels.gemm.wide import WidePlan

FEW, WIDE = Plan(2, 1, False, True, n_clusters=3, n_stages=4), WidePlan(64, 2, n_teams=5, n_together=6)
BF16 = torch.bfloat16


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], torch.Tensor]]:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=7))

    def start(plan: Plan | WidePlan, *given: Any, **more: Any) -> tuple[dict[str, Any], torch.Tensor]:
        found: dict[str, Any] = {}

        def function(args: Any, stream: int) -> int:
            assert stream == 7
            made = ctypes.cast(args, ctypes.POINTER(Args if plan is FEW else WideArgs)).contents
            found.update({name: getattr(made, name) for name, _ in made._fields_})
            return 0

        return found, CompiledProduct(function, plan).start(*given, **more)

    return start


@pytest.mark.parametrize("plan", [FEW, WIDE])
def test_codes_with_scales_are_added_to_a_residual(
    plan: Plan | WidePlan, started: Callable[..., tuple[dict[str, Any], torch.Tensor]]
) -> None:
    x, w = torch.zeros(3, 128)[:, :64], torch.zeros(32, 64)
    scales, bias, residual = (torch.zeros(2), torch.zeros(4)), torch.zeros(32), torch.zeros(3, 40)[:, :32]
    found, y = started(plan, x, w, w.shape, BF16, bias, None, residual, False, None, *scales, (2, 1), 32)
    assert y is residual
    pointers = {"x": x, "w": w, "bias": bias, "y": y, "x_scale": scales[0], "w_scale": scales[1]}
    assert {name: found[name] for name in pointers} == {name: one.data_ptr() for name, one in pointers.items()}
    numbers = {"m": 3, "n": 32, "k": 64, "x_row": 128, "y_row": 40, "x_scale_step": 2, "w_scale_step": 1, "group": 32}
    assert {name: found[name] for name in numbers} == numbers
    if plan is FEW:
        assert (found["residual"], found["residual_row"]) == (y.data_ptr(), 40) and found["norm_weight"] is None
        assert (found["n_clusters"], found["n_stages"], found["token_bits"]) == (3, 4, 2)
    else:
        assert (found["n_teams"], found["n_together"]) == (5, 6) and found["sums"]


def test_a_new_result_of_one_row_whose_stride_says_nothing(
    started: Callable[..., tuple[dict[str, Any], torch.Tensor]],
) -> None:
    norm = torch.zeros(64), 0.5
    found, y = started(
        FEW, torch.zeros(64, 3).t()[:1], torch.zeros(32, 64), (32, 64), BF16, None, norm, None, True, None
    )
    assert (y.shape, y.dtype, found["y"]) == ((1, 16), BF16, y.data_ptr())
    assert (found["x_row"], found["token_bits"], found["eps"]) == (64, 0, 0.5)
    assert found["norm_weight"] == norm[0].data_ptr() and found["residual"] is found["x_scale"] is None


def test_a_launch_that_fails_says_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=0))
    failing = CompiledProduct(lambda *_: 1, WIDE)
    with pytest.raises(RuntimeError, match=r"x \[3, 64\] times w \[32, 64\] could not be launched: CUDA error 1"):
        failing.start(torch.zeros(3, 64), torch.zeros(32, 64), (32, 64), BF16, None, None, None, False, None)


def test_where_tiles_cannot_be_stored() -> None:
    rows = torch.zeros(4, 32, dtype=BF16)
    assert lies_wrong(rows) is None
    assert "multiples of 16 bytes" in str(lies_wrong(rows[:, 4:])) and lies_wrong(torch.zeros(4, 36, dtype=BF16))
