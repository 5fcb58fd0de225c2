"""Mamba-2's `residual_in_fp32` under bfloat16 parameters, against transformers with the key on and off."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from family_cases import IDS, checkpoint_of
from safetensors.torch import load_file, save_file

from quire.compute.models.decoder import decoder_on
from quire.config.model import read_arch

Tools = dict[str, Callable[..., Any]]


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    """Embeddings so large that a stream of bfloat16 loses what layers add: its steps are 2 at 256."""
    checkpoint_of("mamba2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["backbone.embeddings.weight"] = tensors["backbone.embeddings.weight"].sign() * 256
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path, {"format": "pt"})
    return tmp_path


def test_the_stream_is_as_exact_as_the_key_says(checkpoint: pathlib.Path, tools: Tools) -> None:
    found, theirs = {}, {}
    config = json.loads((checkpoint / "config.json").read_text())
    for wide in (True, False):
        (checkpoint / "config.json").write_text(json.dumps({**config, "residual_in_fp32": wide}))
        oracle = transformers.Mamba2ForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        oracle.backbone.norm_f.register_forward_pre_hook(lambda _, given, to=wide: theirs.update({to: given[0][0]}))
        logits = oracle(torch.tensor([IDS])).logits[0]
        model = tools["load"](checkpoint, dtype=torch.bfloat16)
        assert theirs[wide].dtype == model.stream_dtype == (torch.float32 if wide else torch.bfloat16)
        context = tools["context"](model.arch, torch.bfloat16)
        streams = []
        for start, end in ((0, 20), (20, 21), (21, len(IDS))):
            positions = context.begin([(1, start, end - start)])
            given = torch.empty(end - start, model.arch.hidden_size, dtype=model.stream_dtype)  # as graphs do
            streams.append(model.forward(torch.tensor(IDS[start:end]), positions, context, out=given))
            assert streams[-1].data_ptr() == given.data_ptr()
        found[wide] = torch.cat(streams)
        assert found[wide].dtype == model.stream_dtype
        assert (model.logits(found[wide]) - logits).abs().max() <= 0.02
    apart = (theirs[True] - theirs[False]).abs().mean()
    assert all((found[wide].float() - theirs[wide]).abs().mean() < 0.1 * apart for wide in (True, False))


def test_parameters_of_float32_need_nothing_else(checkpoint: pathlib.Path) -> None:
    arch = read_arch(checkpoint)
    assert arch.float32_stream, "transformers' default"
    kinds = {type(layer) for layer in decoder_on(torch.device("meta"), arch, torch.float32, 64).layers}
    assert [kind.__name__ for kind in kinds] == ["DecoderLayer"]
