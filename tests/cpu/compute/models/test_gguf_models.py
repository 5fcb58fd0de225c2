"""Models from GGUF files against transformers: the checkpoint that was written, and its reading of the same file."""

from __future__ import annotations

import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.config.arch import read_arch
from quire.core.errors import LoadError

IDS = list(range(3, 60))
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # family of transformers, architecture of the file, fields of config.json, keys of the file
    "llama": ("Llama", "llama", {}, {}),
    "llama tied": ("Llama", "llama", {"tie_word_embeddings": True}, {}),
    "llama bias": ("Llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama 3 rope": ("Llama", "llama", {"rope_parameters": LLAMA3}, {}),
    "llama linear": (
        "Llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    ),
    "llama yarn": (
        "Llama", "llama",
        {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
    ),
    "mistral": ("Mistral", "llama", {"sliding_window": 16}, {"attention__sliding_window": 16}),
    "qwen2": ("Qwen2", "qwen2", {}, {}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 32}, {}),
    "qwen3 tied": ("Qwen3", "qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits(
    case: str, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any]
) -> None:
    family, architecture, fields, keys = CASES[case]
    oracle = tools["random_checkpoint"](tmp_path / "hf", family, **fields)
    path = write_gguf(tmp_path / "m.gguf", oracle, architecture, **keys)
    theirs, ours = read_arch(tmp_path / "hf"), read_arch(path)
    assert ours.windows == theirs.windows and ours.tie_embeddings == theirs.tie_embeddings
    assert (ours.vocab_size, ours.max_position, ours.dtype) == (theirs.vocab_size, theirs.max_position, "float32")
    found = tools["run_chunks"](tools["load"](path), torch.float32, IDS, [len(IDS)])
    torch.testing.assert_close(found, oracle(torch.tensor([IDS])).logits[0], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_logits_of_the_same_file(
    family: str,
    dtype: str,
    tmp_path: pathlib.Path,
    tools: dict[str, Callable[..., Any]],
    write_gguf: Callable[..., Any],
) -> None:
    """transformers dequantises the file itself."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    head_dim = 64 if family == "Llama" else 128  # transformers does not read the key of qwen3
    model = tools["random_checkpoint"](tmp_path / "hf", family, head_dim=head_dim, **sizes)
    path = write_gguf(tmp_path / "m.gguf", model, family.lower(), dtype)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    oracle = AutoModelForCausalLM.from_config(config).eval()
    oracle.load_state_dict(load_gguf_checkpoint(path, return_tensors=True, model_to_load=oracle)["tensors"])
    found = tools["run_chunks"](tools["load"](path), torch.float32, IDS, [len(IDS)])
    torch.testing.assert_close(found, oracle(torch.tensor([IDS])).logits[0], rtol=1e-3, atol=5e-4)


def test_flipped_bytes(
    tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any]
) -> None:
    """A damaged file is refused, or gives a model without NaN; it never crashes."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 40}
    model = tools["random_checkpoint"](tmp_path / "hf", "Llama", **sizes)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", "Q8_0")
    whole, chance, n_refused = path.read_bytes(), random.Random(0), 0
    for round_number in range(200):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            damaged[chance.randrange(len(whole))] = chance.randrange(256)
        path.write_bytes(damaged)
        os.utime(path, ns=(round_number, round_number))
        try:
            loaded = tools["load"](path, max_model_len=16)
        except LoadError:
            n_refused += 1
            continue
        assert loaded.embed.weight.isfinite().all() and loaded.norm.weight.isfinite().all()
    assert 50 < n_refused < 190, n_refused


def test_refused_weights(
    tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any]
) -> None:
    model = tools["random_checkpoint"](tmp_path / "hf", "Llama", num_hidden_layers=1, hidden_size=32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = float("nan")
    with pytest.raises(LoadError, match=r"mlp\.down_proj\.weight .*NaN"):
        tools["load"](write_gguf(tmp_path / "nan.gguf", model, "llama"))
    data = bytearray(write_gguf(tmp_path / "scale.gguf", model, "llama", "Q8_0").read_bytes())
    path = tmp_path / "renamed.gguf"
    path.write_bytes(data.replace(b"blk.0.attn_v", b"blk.0.attn_x"))
    with pytest.raises(LoadError, match=r"blk\.0\.attn_x\.weight"):
        tools["load"](path)
