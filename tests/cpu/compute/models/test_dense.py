"""The dense model against transformers: every family and feature, in one go and in chunks, and 64 greedy tokens."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from quire.compute.schemes.choice import floating
from quire.compute.schemes.plain import Plain
from quire.kernels.qkv import rotate_and_store

Tools = dict[str, Callable[..., Any]]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LAYERED = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CASES = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "beta_fast": 16.0}}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", LAYERED),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3", {"head_dim": 32, "attention_bias": True, **LAYERED}),
}
CHUNKS = [7, 1, 1, 16, 15]
IDS = torch.randint(1, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_family(case: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    family, fields = CASES[case]
    oracle = tools["random_checkpoint"](tmp_path, family, **fields)
    model = tools["load"](tmp_path)
    expected = oracle(torch.tensor([IDS])).logits[0]
    assert expected.abs().max() > 1, "the oracle says nothing"
    whole = tools["run_chunks"](model, torch.float32, IDS, [len(IDS)])
    chunked = tools["run_chunks"](model, torch.float32, IDS, CHUNKS)
    assert whole.dtype == torch.float32
    assert (whole - expected).abs().max() <= 1e-4
    assert (chunked - expected).abs().max() <= 1e-4
    targets = torch.tensor(IDS[1:])
    ours, theirs = (x.log_softmax(-1)[:-1].gather(1, targets[:, None]) for x in (chunked, expected))
    assert (ours - theirs).abs().max() <= 1e-3
    generated = oracle.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=64, eos_token_id=None)
    assert tools["greedy"](model, torch.float32, IDS, 64) == generated[0, len(IDS) :].tolist()


def test_windows_matter(tmp_path: pathlib.Path, tools: Tools) -> None:
    """The inverse: without its window the model gives other logits, so the window cases above can fail."""
    oracle = tools["random_checkpoint"](tmp_path, "Mistral", sliding_window=9)
    edit_config(tmp_path, sliding_window=None)
    logits = tools["run_chunks"](tools["load"](tmp_path), torch.float32, IDS, [len(IDS)])
    difference = (logits - oracle(torch.tensor([IDS])).logits[0]).abs().amax(-1)
    assert difference[:9].max() <= 1e-4 and difference[9:].max() > 0.1


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_stored_dtypes(family: str, stored: torch.dtype, tmp_path: pathlib.Path, tools: Tools) -> None:
    """A checkpoint of any dtype, loaded as float32, has the same logits as in transformers."""
    tools["random_checkpoint"](tmp_path, family, dtype=stored)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = oracle(torch.tensor([IDS])).logits[0]
    logits = tools["run_chunks"](tools["load"](tmp_path), torch.float32, IDS, CHUNKS)
    assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tmp_path: pathlib.Path, tools: Tools) -> None:
    """In 16 bits the error against float32 stays within twice that of transformers in the same type."""
    oracle = tools["random_checkpoint"](tmp_path, "Llama", dtype=dtype)
    theirs = oracle(torch.tensor([IDS])).logits[0].float()
    exact = oracle.float()(torch.tensor([IDS])).logits[0]
    ours = tools["run_chunks"](tools["load"](tmp_path, dtype), dtype, IDS, CHUNKS)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_sharded(tmp_path: pathlib.Path, tools: Tools) -> None:
    oracle = tools["random_checkpoint"](tmp_path, "Llama", shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    logits = tools["run_chunks"](tools["load"](tmp_path), torch.float32, IDS, CHUNKS)
    assert (logits - oracle(torch.tensor([IDS])).logits[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 2.0}, {**YARN, "attention_factor": 1.3}, LLAMA3])
def test_old_spelling(scaling: dict[str, Any], tmp_path: pathlib.Path, tools: Tools) -> None:
    """`rope_theta` and `rope_scaling`, as config.json had them before transformers 5."""
    tools["random_checkpoint"](tmp_path, "Llama")
    edit_config(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling, torch_dtype="float32", dtype=None)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    logits = tools["run_chunks"](tools["load"](tmp_path), torch.float32, IDS, CHUNKS)
    assert (logits - oracle(torch.tensor([IDS])).logits[0]).abs().max() <= 1e-4


def test_dynamic_rope_beyond_the_original_context(tmp_path: pathlib.Path, tools: Tools) -> None:
    """A table for 96 tokens of a model of 32 is what transformers uses for a prompt of 96 tokens."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    oracle = tools["random_checkpoint"](tmp_path, "Llama", rope_parameters=scaling, max_position_embeddings=32)
    ids = (IDS * 3)[:96]
    model = tools["load"](tmp_path, max_model_len=96)
    logits = tools["run_chunks"](model, torch.float32, ids, [40, 56])
    assert (logits - oracle(torch.tensor([ids])).logits[0]).abs().max() <= 1e-4


def test_flat_batch(tmp_path: pathlib.Path, tools: Tools) -> None:
    """Spans of two sequences, one decoding and one in its prompt, do not see each other."""
    tools["random_checkpoint"](tmp_path, "Qwen3", head_dim=32)
    model = tools["load"](tmp_path)
    context = tools["context"](model.arch, torch.float32)
    first, second = IDS[:20], IDS[20:]
    model.forward(torch.tensor(first[:19]), context.begin([(0, 0, 19)]), context)
    positions = context.begin([(0, 19, 1), (1, 0, 20)])
    logits = model.logits(model.forward(torch.tensor(first[19:] + second), positions, context))
    alone = [tools["run_chunks"](model, torch.float32, ids, [20]) for ids in (first, second)]
    assert (logits[0] - alone[0][-1]).abs().max() <= 1e-4
    assert (logits[1:] - alone[1]).abs().max() <= 1e-4


class SelfOnly:
    """A context whose attention returns its queries: what remains of the model works row by row."""

    def store(self, layer: int, qkv: torch.Tensor, *given: Any) -> torch.Tensor:
        pages = torch.zeros(2, 1, 2, 1, 32, dtype=qkv.dtype)
        return rotate_and_store(qkv, *given, *pages, torch.zeros(len(qkv), dtype=torch.int64))

    def attend(self, layer: int, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return q.contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_attention_mixes_rows(dtype: torch.dtype, tmp_path: pathlib.Path, tools: Tools) -> None:
    """A token's logits have the same bits alone and among others."""
    if type(floating(torch.device("cpu"), dtype)) is Plain:
        pytest.skip(f"this CPU has no kernel for {dtype} whose sums are in a fixed order")
    tools["random_checkpoint"](tmp_path, "Qwen3", head_dim=32, hidden_size=320, intermediate_size=864)
    model = tools["load"](tmp_path, dtype)
    ids, positions = torch.tensor(IDS), torch.arange(len(IDS))
    together = model.logits(model.forward(ids, positions, SelfOnly()))
    for start, stop in ((0, 1), (39, 40), (3, 5), (10, 17), (8, 40)):
        rows = slice(start, stop)
        alone = model.logits(model.forward(ids[rows], positions[rows], SelfOnly()))
        assert torch.equal(alone, together[rows]), f"rows {start} to {stop}"


def edit_config(folder: pathlib.Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
