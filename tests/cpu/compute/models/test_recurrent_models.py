"""Checkpoints of recurrent models: tensors that are no part of them, and what is missing or has another shape."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_cases import IDS, checkpoint_of
from safetensors.torch import load_file, save_file

from quire.core.errors import LoadError

Tools = dict[str, Callable[..., Any]]


def change(folder: pathlib.Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})


def test_the_drafting_module_of_qwen3_next_is_left_out(tmp_path: pathlib.Path, tools: Tools) -> None:
    oracle = checkpoint_of("qwen3_next-dense", tmp_path)
    change(tmp_path, {"mtp.fc.weight": torch.ones(3, 3), "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2)})
    expected = oracle(torch.tensor([IDS])).logits[0]
    got = tools["run_chunks"](tools["load"](tmp_path), torch.float32, IDS, [len(IDS)])
    assert (got - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mamba2", "backbone.layers.1.mixer.A_log"),
        ("lfm2", "model.layers.0.conv.conv.weight"),
        ("qwen3_next-dense", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("bamba", "model.layers.2.mamba.norm.weight"),
    ],
)
def test_what_is_missing_or_mis_shaped_is_named(case: str, name: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    checkpoint_of(case, tmp_path)
    tensor = load_file(tmp_path / "model.safetensors")[name]
    change(tmp_path, {name: tensor[1:].clone()})
    with pytest.raises(LoadError, match=f"tensor {name} has shape"):
        tools["load"](tmp_path)
    change(tmp_path, {name: None})
    with pytest.raises(LoadError, match=f"has no tensor '{name}'"):
        tools["load"](tmp_path)
