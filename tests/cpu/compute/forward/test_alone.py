"""Which models a GPU refuses to compute so that rows are alone, and what it says: found without one."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest
import torch
from family_cases import checkpoint_of

from quire.compute.device.cpu import CpuDevice
from quire.compute.forward import alone
from quire.compute.runner.pool import KVPool
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "machine_obstacle", lambda: None)
    monkeypatch.setattr(alone, "triton_obstacle", lambda: None)


def found(case: str, folder: pathlib.Path, dtype: torch.dtype = torch.bfloat16, **pool: Any) -> str:
    """pool: what its shape is instead."""
    checkpoint_of(case, folder)
    model = load_model(folder, read_arch(folder), dtype=dtype, device=torch.device("cpu"), max_model_len=128)
    own = KVPool(model.arch, 4, 16, dtype, CpuDevice(1))
    given = {name: getattr(own, name) for name in ("layout", "k", "n_heads", "head_dim", "value_dim", "group")}
    return alone.obstacle(model, types.SimpleNamespace(**given | pool))  # type: ignore[arg-type]


def test_states_alone_are_no_obstacle(tmp_path: pathlib.Path) -> None:
    assert found("mamba2", tmp_path) == ""


@pytest.mark.parametrize(
    ("case", "given", "said"),
    [
        ("mamba2", {"dtype": torch.float32}, "x is torch.float32"),
        ("olmo2", {"head_dim": 128, "group": 71}, "attention: 71 query heads of a KV head are more than the 64 rows"),
        ("olmo2", {"head_dim": 40}, "attention: head_dim 40 is not one of"),
        ("deepseek_v2-lite", {}, "attention: values are 32 of a key of 40 numbers, not 512 of 576"),
        ("deepseek_v2-lite", {"head_dim": 576, "value_dim": 512, "n_heads": 129}, "129 query heads of a key are more"),
    ],
)
def test_what_has_no_such_kernel_is_named(
    case: str, given: dict[str, Any], said: str, tmp_path: pathlib.Path
) -> None:
    assert said in found(case, tmp_path, **given)
