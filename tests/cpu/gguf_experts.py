"""GGUF files of gpt-oss for tests, laid out as llama.cpp's converter does it, under the names of the package gguf."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from coded_checkpoints import mxfp4_experts
from family_cases import CASES, random_checkpoint
from gguf_files import add_value
from safetensors.torch import load_file

from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder
from quire.compute.schemes import choice, holding

NAME = "gpt-oss"
SIZES = {
    **CASES["gpt_oss"][1], "num_local_experts": 4, "intermediate_size": 64, "hidden_size": 96, "swiglu_limit": 7.0,
}  # fmt: skip
KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
}  # fmt: skip
"""Field of config.json → key of the file."""


def keys_of(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata of a file."""
    rope = config["rope_parameters"]
    return {key: config[field] for field, key in KEYS.items()} | {
        "expert_feed_forward_length": config["intermediate_size"], "attention.value_length": config["head_dim"],
        "rope.freq_base": float(rope["rope_theta"]), "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }  # fmt: skip


def blocks_of(octets: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Two neighbours a byte [..., blocks, 16], exponents [..., blocks] → blocks of a file [..., bytes]: the exponent,
    then bytes with a number of the first half of the block and one of the second."""
    codes = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
    halves = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat((exponents[..., None], halves), dim=-1).flatten(-2)


def tensors_of(folder: pathlib.Path) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name in config.json's own words, numbers or blocks, whether it is blocks of MXFP4) of a checkpoint of gpt-oss
    whose experts are in MXFP4 or floating, gate and up each by itself."""
    found = load_file(folder / "model.safetensors")
    for name, tensor in found.items():
        if name.endswith("_scales"):
            continue
        is_blocks, stem, kind = name.endswith("_blocks"), name, ""
        if ".experts." in name:
            stem = name.removesuffix("_blocks").removesuffix("_bias")
            kind = ".bias" if name.endswith("_bias") else ".weight"
            if is_blocks:
                tensor = blocks_of(tensor, found[f"{stem}_scales"])
            elif kind == ".weight":
                tensor = tensor.transpose(1, 2)
        if stem.endswith("gate_up_proj"):
            for place, part in enumerate(("gate_proj", "up_proj")):
                yield stem.replace("gate_up_proj", part) + kind, tensor[:, place::2].contiguous(), is_blocks
        else:
            yield stem + kind, tensor.contiguous(), is_blocks


def names_of(folder: pathlib.Path) -> dict[str, str]:
    """Name of `tensors_of` → name in a file, by the package's table."""
    config = json.loads((folder / "config.json").read_text())
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config["num_hidden_layers"])
    found = {}
    for stored, _, _ in tensors_of(folder):
        full = stored + ".weight" if stored.endswith(".sinks") else stored
        name = table.get_name(full, try_suffixes=(".weight", ".bias"))
        assert name is not None, stored
        found[stored] = name
    return found


def write_gpt_oss(
    folder: pathlib.Path, path: pathlib.Path, dense: str = "F32", experts: str = "F32", **changes: Any
) -> pathlib.Path:
    """The checkpoint in `folder` as a file. dense: type of the other matrices; experts: of those that are floating
    there. changes: key → another value, None for none, and '__' for '.'; a tensor's name → None."""
    config = json.loads((folder / "config.json").read_text())
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    names = names_of(folder)
    writer = gguf.GGUFWriter(path, NAME)
    for key, value in (keys_of(config) | changes).items():
        if value is not None:
            add_value(writer, f"{NAME}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{number}" for number in range(config["vocab_size"])])
    for stored, tensor, is_blocks in tensors_of(folder):
        name = names[stored]
        if name in changes:
            continue
        kind = experts if tensor.dim() == 3 else dense
        if is_blocks:
            writer.add_tensor(name, tensor.numpy(), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        elif name.endswith("bias") or tensor.dim() == 1 or "ffn_gate_inp" in name or kind == "F32":
            writer.add_tensor(name, tensor.float().numpy())
        else:
            dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def numbers_of(path: pathlib.Path, name: str) -> torch.Tensor:
    """A tensor of a file as the package decodes it."""
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == name)
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))


def checkpoints(folder: pathlib.Path) -> pathlib.Path:
    """A checkpoint of floating experts, one of MXFP4 ('coded'), and one of its numbers ('plain')."""
    random_checkpoint(folder / "floating", "GptOss", **SIZES)
    mxfp4_experts(folder / "floating", folder / "coded", folder / "plain")
    return folder


def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds matrices there holds them here."""
    held_on = choice.held_on
    monkeypatch.setattr(choice, "held_on", lambda device, dtype: held_on(torch.device("cuda"), dtype))
    monkeypatch.setitem(holding.HOLDERS, "cpu", holding.HOLDERS["cuda"])


def ffns(model: Decoder) -> list[Experts]:
    found = [layer.ffn for layer in model.layers]
    assert all(isinstance(ffn, Experts) for ffn in found)
    return found  # type: ignore[return-value]


def schemes(model: Decoder) -> set[str]:
    return {linear.scheme.name for ffn in ffns(model) for bank in (ffn.up, ffn.down) for linear in bank.linears}
