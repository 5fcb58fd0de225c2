"""Scales of a cache in e4m3: every spelling of their names, of which layers, and what is no scale."""

from __future__ import annotations

import pathlib

import pytest
import torch
from safetensors.torch import save_file

from quire.compute.weights.kv_scales import read_kv_scales
from quire.config.stages import LayerRange
from quire.core.errors import LoadError
from quire.kernels.kvstore.entry import Scales

ALL = LayerRange(0, 12, 12)


def folder_of(folder: pathlib.Path, tensors: dict[str, torch.Tensor]) -> pathlib.Path:
    save_file(tensors | {"model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return folder


def test_names_and_stages(tmp_path: pathlib.Path) -> None:
    names = {
        "model.layers.0.self_attn.k_scale": 0.5, "model.layers.0.self_attn.v_scale": 2.0,
        "model.layers.1.self_attn.attn.k_scale": 0.25,
        "model.layers.2.self_attn.k_proj.k_scale": 3.0, "model.layers.2.self_attn.v_proj.v_scale": 4.0,
        "model.layers.3.self_attn.k_proj.output_scale": 5.0, "model.layers.3.self_attn.v_proj.output_scale": 6.0,
        "model.layers.4.self_attn.kv_scale": 7.0,
        "model.layers.10.attention.k_scale": 8.0, "model.layers.11.self_attn.qkv_proj.v_scale": 6.0,
        "model.layers.5.self_attn.q_scale": 9.0, "model.layers.5.self_attn.q_proj.output_scale": 9.0,
        "model.layers.5.mlp.down_proj.output_scale": 9.0, "model.layers.5.self_attn.o_proj.weight_scale": 9.0,
    }  # fmt: skip
    tensors = {name: torch.tensor([value]) for name, value in names.items()}
    tensors["model.layers.0.self_attn.v_scale"] = torch.tensor(2.0, dtype=torch.bfloat16)
    folder = folder_of(tmp_path, tensors)
    assert read_kv_scales(folder, "llama", ALL) == {
        0: Scales(0.5, 2.0), 1: Scales(0.25, 1.0), 2: Scales(3.0, 4.0), 3: Scales(5.0, 6.0), 4: Scales(7.0, 7.0),
        10: Scales(8.0, 1.0), 11: Scales(1.0, 6.0),
    }  # fmt: skip
    assert read_kv_scales(folder, "llama", LayerRange(4, 12, 12)) == {
        0: Scales(7.0, 7.0),
        6: Scales(8.0, 1.0),
        7: Scales(1.0, 6.0),
    }


@pytest.mark.parametrize("family, layer", [
    ("falcon", "transformer.h.1.self_attention"), ("gpt2", "transformer.h.1.attn"),
    ("gpt_neox", "gpt_neox.layers.1.attention"), ("granitemoehybrid", "model.layers.1.self_attn"),
    ("opt", "model.decoder.layers.1.self_attn"), ("llama", "model.layers.1.self_attn"),
])  # fmt: skip
def test_layers_are_called_as_the_family_calls_them(tmp_path: pathlib.Path, family: str, layer: str) -> None:
    """Those of a vision tower beside the model, numbered alike, are not the model's."""
    tensors = {f"{layer}.k_scale": torch.tensor(3.0)}
    tensors |= {f"vision_tower.{layer}.{kind}_scale": torch.tensor(9.0) for kind in "kv"}
    tensors |= {
        f"vision_tower.vision_model.encoder.layers.0.self_attn.{kind}_scale": torch.tensor(9.0) for kind in "kv"
    }
    assert read_kv_scales(folder_of(tmp_path, tensors), family, ALL) == {1: Scales(3.0, 1.0)}


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.ones(8), r"k_scale is F32 \[8\]: .* reads one"),
        (torch.ones(1, dtype=torch.int32), "is I32"),
        (torch.tensor(0.0), "k_scale is 0.0: a scale must be a positive number"),
        (torch.tensor(float("inf")), "is inf"),
    ],
)
def test_what_is_no_scale_is_named(tmp_path: pathlib.Path, scale: torch.Tensor, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        read_kv_scales(folder_of(tmp_path, {"model.layers.0.self_attn.k_scale": scale}), "llama", ALL)
