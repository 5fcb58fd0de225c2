"""What a config.json of each family may not ask for: a key that would change the model is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.families import FAMILIES
from quire.config.model import parse_arch
from quire.core.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_heads": 2,
    "n_groups": 1,
    "mamba_n_heads": 2,
}
BY_NAME = {family.name: family for family in FAMILIES.values()}
DIVISORS = [1.0] * 8
LONG: dict[str, Any] = {"short_factor": DIVISORS, "long_factor": DIVISORS}


def config_of(name: str, **more: Any) -> dict[str, Any]:
    """A small config.json of the family called `name`."""
    family = BY_NAME[name]
    sizes = {family.keys.get(key, key): value for key, value in SIZES.items()}
    return {"architectures": [family.architecture], "model_type": family.model_type, **sizes, **more}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    ("field", "value", "usual"),
    [
        ("is_encoder_decoder", True, False),
        ("add_cross_attention", True, False),
        ("use_bidirectional_attention", True, None),
        ("is_causal", False, True),
        ("per_layer_config", {"0": {"intermediate_size": 48}}, {}),
    ],
)
def test_what_is_no_decoder(name: str, field: str, value: Any, usual: Any) -> None:
    assert parse_arch(config_of(name, **{field: usual})) == parse_arch(config_of(name))
    with pytest.raises(ConfigError, match=field) as caught:
        parse_arch(config_of(name, **{field: value}))
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma2", "sliding_window", None),
        ("gemma3", "sliding_window", None),
        ("olmo", "clip_qkv", 0),
        ("olmo", "clip_qkv", -1.0),
        ("olmo3", "sliding_window", None),
        ("olmo3", "layer_types", ["full_attention", "chunked_attention", "full_attention"]),
        ("granite", "embedding_multiplier", 0),
        ("granite", "logits_scaling", 0),
        ("granite", "residual_multiplier", -0.5),
        ("granite", "attention_multiplier", "0.1"),
        ("glm", "partial_rotary_factor", 0.01),
        ("phi", "tie_word_embeddings", True),
        ("phi3", "sliding_window", 0),
        ("cohere", "logit_scale", 0),
        ("cohere", "use_qk_norm", 1),
        ("cohere2", "sliding_window", None),
        ("cohere2", "sliding_window_pattern", 0),
        ("cohere2", "use_qk_norm", True),
        ("cohere2", "use_gated_activation", False),
        ("cohere2", "use_parallel_block", False),
        ("cohere2", "rotary_pct", 0.5),
        ("cohere2", "position_embedding_type", "alibi"),
        ("cohere2", "order_of_interleaved_layers", "global_attn_first"),
        ("lfm2", "conv_L_cache", 1),
        ("lfm2", "layer_types", ["conv", "sliding_attention", "conv"]),
        ("lfm2", "full_attn_idxs", [5]),
        ("mamba2", "num_heads", 3),
        ("mamba2", "n_groups", 3),
        ("mamba2", "hidden_act", "gelu"),
        ("mamba2", "time_step_limit", [1.0, 0.5]),
        ("mamba2", "time_step_limit", {"__float__": "Infinity"}),
        ("bamba", "attn_layer_indices", [7]),
        ("bamba", "mamba_d_state", 0),
        ("granitemoehybrid", "position_embedding_type", "alibi"),
        ("granitemoehybrid", "layer_types", ["mamba"]),
        ("qwen3_next", "linear_num_value_heads", 3),
        ("qwen3_next", "layer_types", ["linear_attention", "conv", "full_attention"]),
    ],
)
def test_what_a_family_does_not_do(name: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        parse_arch(config_of(name, **{field: value}))
    assert caught.value.param == field


def test_rope_of_phi3() -> None:
    """Two old names of one type, which is all that there is besides none; the original context is 4096 tokens."""
    ropes = [
        parse_arch(config_of("phi3", rope_scaling={**LONG, "type": kind})).ropes[0]
        for kind in ("longrope", "su", "yarn")
    ]
    assert ropes[0] == ropes[1] == ropes[2] and ropes[0].type == "longrope"
    assert ropes[0].original_max_position == 4096
    inside = parse_arch(config_of("phi3", rope_scaling={**LONG, "type": "su", "original_max_position_embeddings": 32}))
    outside = parse_arch(config_of("phi3", rope_scaling={**LONG, "type": "su"}, original_max_position_embeddings=32))
    assert inside == outside and inside.ropes[0].original_max_position == 32
    for kind in ("linear", "dynamic", "llama3"):
        with pytest.raises(ConfigError, match="must be one of default, longrope, su, yarn"):
            parse_arch(config_of("phi3", rope_scaling={"type": kind, "factor": 2.0}))
