"""What config.json means where it says little, or says it in an older way: transformers reads it, and so do we."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from quire.config.model import parse_arch
from quire.core.errors import ConfigError

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2", {}),
    "starcoder2-old-rope": ("Starcoder2", {**LINEAR, "sliding_window": 32}),
    "stablelm": ("StableLm", {}),
    "stablelm-old-rope": ("StableLm", {**LINEAR, "partial_rotary_factor": 0.5}),
    "falcon": ("Falcon", {}),
    "falcon-n_embed": ("Falcon", {"n_embed": 96, "num_kv_heads": 4, "multi_query": True}),
    "falcon-old-rope": ("Falcon", LINEAR),
    "exaone4": ("Exaone4", {"num_key_value_heads": 4}),
    "exaone4-old-rope": ("Exaone4", {**LINEAR, "sliding_window_pattern": 3}),
    "ministral": ("Ministral", {"head_dim": 16}),
    "ministral-no-window": ("Ministral", {"head_dim": 16, "sliding_window": None, "rope_theta": 1e6}),
    "seed_oss": ("SeedOss", {}),
    "seed_oss-nulls": ("SeedOss", {**LINEAR, "head_dim": None, "num_key_value_heads": None}),
    "smollm3": ("SmolLM3", {}),
    "smollm3-old-rope": ("SmolLM3", {**LINEAR, "no_rope_layer_interval": 3}),
    "nemotron": ("Nemotron", {}),
    "nemotron-old-rope": ("Nemotron", {**LINEAR, "partial_rotary_factor": 0.25, "head_dim": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_old_and_new_spelling_mean_the_same(case: str) -> None:
    name, fields = CASES[case]
    written = {**SIZES, **fields, "architectures": [f"{name}ForCausalLM"]}
    theirs = json.loads(getattr(transformers, f"{name}Config")(**written).to_json_string(use_diff=False))
    assert "rope_parameters" in theirs and "rope_theta" not in theirs
    assert parse_arch(dict(written)) == parse_arch({**theirs, "architectures": written["architectures"]})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "starcoder2": ("Starcoder2", {"norm_type": "rms_norm"}, "norm_type = 'rms_norm' must be one of layer_norm"),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.2}, "partial_rotary_factor = 0.2 rotates 3"),
    "falcon-norms": ("Falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2 must be 1"),
    "falcon-new": (
        "Falcon",
        {"new_decoder_architecture": True, "parallel_attn": False},
        "parallel_attn = False must be true",
    ),
    "minicpm-sparse": ("MiniCPM", {"sparse_config": {"topk": 64}}, "sparse_config"),
    "minicpm-experts": ("MiniCPM", {"num_experts": 8}, "num_experts = 8 must be 0"),
    "exaone4-pattern": ("Exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern = 'LLLG'"),
    "exaone4-window": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 6},
        "sliding_window = None",
    ),
    "ministral": (
        "Ministral",
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 6},
        "sliding_window = None",
    ),
    "smollm3-short": ("SmolLM3", {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\] must be at least"),
    "smollm3-window": ("SmolLM3", {"layer_types": ["sliding_attention"] * 6}, "layer_types"),
    "nemotron": ("Nemotron", {"partial_rotary_factor": 0.2}, "partial_rotary_factor = 0.2 rotates 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_refused_by_its_key(case: str) -> None:
    name, fields, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        parse_arch({**SIZES, "architectures": [f"{name}ForCausalLM"], **fields})
    parse_arch({**SIZES, "architectures": [f"{name}ForCausalLM"]})
