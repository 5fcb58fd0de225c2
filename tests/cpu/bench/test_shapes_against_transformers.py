"""Bundled shapes have as many parameters as transformers makes of the same config.json, on the meta device."""

from __future__ import annotations

import pathlib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quire.bench.shape import FOLDER, shape_names
from quire.config.model import read_arch

BUFFERS = {"deepseek-v3": 58 * 256}
"""Corrections of scores: stored with the checkpoint, and no parameters there."""


def count(folder: pathlib.Path) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", shape_names())
def test_parameters(name: str) -> None:
    assert read_arch(FOLDER / name).n_parameters == count(FOLDER / name) + BUFFERS.get(name, 0)
