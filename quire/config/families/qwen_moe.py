"""Qwen 2 and 3 with experts, some layers dense; the former with a shared expert that has a gate."""

from __future__ import annotations

from typing import Final

from quire.config.arch import MAX_WIDTH, ModelArch
from quire.config.attention import AttentionSpec
from quire.config.expert_fields import every_step, experts
from quire.config.experts import SharedExpert
from quire.config.families.family import Family, Gguf
from quire.config.layers import FfnSpec, LayerSpec, QKNorm
from quire.config.model_fields import SLIDING, ModelFields


def qwen2_moe(config: ModelFields) -> ModelArch:
    shared_size = config.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 5632)
    shared = SharedExpert(size=shared_size, gated=True)
    sparse = experts(config, n_experts=60, n_chosen=4, size=1408, shared=shared)
    rope, bias = config.rope(), config.flag("qkv_bias", True)
    mixers = [config.attention(n_kv_heads=16, rope=rope, qkv_bias=bias, window=window) for window in _windows(config)]
    return _described(config, mixers, every_step(config, sparse))


def qwen3_moe(config: ModelFields) -> ModelArch:
    norm, bias = config.rms(), config.flag("attention_bias", False)
    window = config.window() if config.flag("use_sliding_window", False) else 0
    mixer = config.attention(
        n_kv_heads=4, rope=config.rope(), qkv_bias=bias, o_bias=bias, qk_norm=QKNorm(norm=norm), window=window
    )
    sparse = experts(config, n_experts=128, n_chosen=8, size=768)
    return _described(config, [mixer] * config.n_layers, every_step(config, sparse))


def _described(config: ModelFields, mixers: list[AttentionSpec], ffns: list[FfnSpec]) -> ModelArch:
    norm = config.rms()
    layers = [LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return config.model(layers, norm)


def _windows(config: ModelFields) -> list[int]:
    """Of every second of the first layers, where there are windows at all."""
    window = config.window() if config.flag("use_sliding_window", False) else 0
    types = config.layer_types()
    if not types:
        n_first = config.integer("max_window_layers", 0, 1024, 28)
        return [window if layer % 2 == 0 and layer < n_first else 0 for layer in range(config.n_layers)]
    if not window and SLIDING in types:
        raise config.error("layer_types", "all full_attention, as use_sliding_window is not true")
    return [window if kind == SLIDING else 0 for kind in types]


KEYS: Final = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
"""Of their GGUF files."""
FAMILIES: Final = (
    Family(
        name="qwen2_moe", architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", describe=qwen2_moe,
        gguf=Gguf(
            architecture="qwen2moe", plain={"expert_weights_norm": (False,)},
            keys={**KEYS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        ),
    ),
    Family(
        name="qwen3_moe", architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", describe=qwen3_moe,
        gguf=Gguf(architecture="qwen3moe", keys=KEYS, fields={"norm_topk_prob": True}),
    ),
)  # fmt: skip
