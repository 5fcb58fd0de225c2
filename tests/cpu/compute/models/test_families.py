"""Every family against transformers: logits and 64 greedy tokens of a small random checkpoint.

Prompt logprobs are the engine's: tests/cpu/engine/test_family_engine.py.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_cases import CASES, DIVISORS, IDS, YARN, checkpoint_of

from quire.compute.weights.footprint import Weights
from quire.config.experts import CORRECTION
from quire.config.families import FAMILIES
from quire.config.model import read_arch

Tools = dict[str, Callable[..., Any]]
CHUNKS = [7, 1, 1, 16, 15]
OLD_LINEAR = {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
OLD_LONG = {"type": "yarn", "short_factor": DIVISORS[:6], "long_factor": DIVISORS[2:]}
OLD: dict[str, dict[str, Any]] = {
    "gemma": {"rope_theta": 5e4, "hidden_act": "gelu"},
    "gemma2": {"rope_theta": 5e4},
    "gemma3": {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gpt_neox": {"rotary_emb_base": 50_000, "rotary_pct": 0.5},
    "olmo": OLD_LINEAR,
    "olmo2": OLD_LINEAR,
    "olmo3": {"rope_theta": 5e5, "rope_scaling": YARN},
    "granite": OLD_LINEAR,
    "glm": {"rope_theta": 5e4, "partial_rotary_factor": 0.25},
    "glm4": {"rope_theta": 5e4, "partial_rotary_factor": 0.25},
    "phi": {"rope_theta": 5e4, "partial_rotary_factor": 0.25, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "phi3": {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 32, "rope_scaling": OLD_LONG},
    "phi3-window": {"rope_theta": 5e4},
    "cohere": OLD_LINEAR,
    "cohere2": {"rope_theta": 5e4, "sliding_window_pattern": 2},
}
"""Case → keys that its config.json had before transformers 5, in place of rope_parameters and layer_types."""


@pytest.mark.parametrize("case", CASES)
def test_family(case: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    oracle = checkpoint_of(case, tmp_path)
    arch = read_arch(tmp_path)
    assert arch.family == case.partition("-")[0]
    corrections = [buffer for name, buffer in oracle.named_buffers() if name.endswith(CORRECTION)]
    assert arch.n_parameters == sum(p.numel() for p in [*oracle.parameters(), *corrections])
    model = tools["load"](tmp_path)
    footprint = Weights(tmp_path, arch, torch.device("cpu")).footprint(torch.float32, "none")
    assert footprint.held_bytes == model.n_bytes <= footprint.peak_bytes
    expected = oracle(torch.tensor([IDS])).logits[0]
    assert expected.abs().max() > 1, "the oracle says nothing"
    assert (tools["run_chunks"](model, torch.float32, IDS, [len(IDS)]) - expected).abs().max() <= 1e-4
    assert (tools["run_chunks"](model, torch.float32, IDS, CHUNKS) - expected).abs().max() <= 1e-4
    generated = oracle.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=64, eos_token_id=None)
    assert tools["greedy"](model, torch.float32, IDS, 64) == generated[0, len(IDS) :].tolist()


@pytest.mark.parametrize("case", OLD)
def test_old_spelling(case: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    family, fields = CASES[case]
    written = type(tools["random_checkpoint"](tmp_path, family, **fields))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types", "rotary_pct", "original_max_position_embeddings"):
        config.pop(name, None)
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps({**config, **OLD[case]}))
    oracle = written.from_pretrained(tmp_path, attn_implementation="eager")
    expected = oracle(torch.tensor([IDS])).logits[0]
    assert (tools["run_chunks"](tools["load"](tmp_path), torch.float32, IDS, CHUNKS) - expected).abs().max() <= 1e-4


def test_every_family_has_a_case() -> None:
    elsewhere = {"llama", "mistral", "qwen2", "qwen3"}  # test_dense.py
    assert {case.partition("-")[0] for case in CASES} | elsewhere == {family.name for family in FAMILIES.values()}
