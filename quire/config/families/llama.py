"""Llama, and what differs from it by little: Mistral, Ministral, Qwen 2 and 3, MiMo, Seed-OSS, SmolLM 3."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family, Gguf
from quire.config.heads import HeadLayout
from quire.config.layers import LayerSpec, QKNorm
from quire.config.model_fields import FULL, SLIDING, ModelFields


def llama(config: ModelFields) -> ModelArch:
    bias, norm = config.flag("attention_bias", False), config.rms()
    mixer = config.attention(rope=config.rope(), qkv_bias=bias, o_bias=bias)
    ffn = config.feed_forward(bias=config.flag("mlp_bias", False))
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm)] * config.n_layers, norm)


def mistral(config: ModelFields) -> ModelArch:
    if len(set(config.layer_types())) > 1:
        raise config.error("layer_types", "the same for every layer of a Mistral model")
    norm = config.rms()
    window = 0 if config.is_null("sliding_window") else config.window()
    mixer = config.attention(n_kv_heads=8, rope=config.rope(), window=window)
    layer = LayerSpec(mixer=mixer, ffn=config.feed_forward(), norm=norm)
    return config.model([layer] * config.n_layers, norm)


def ministral(config: ModelFields) -> ModelArch:
    norm, ffn, rope = config.rms(), config.feed_forward(), config.rope()
    window = 0 if config.is_null("sliding_window") else config.window()
    types = config.layer_types([SLIDING if window else FULL] * config.n_layers)
    if SLIDING in types and not window:
        raise config.error("sliding_window", "a number of tokens, as layer_types has sliding_attention")
    kinds = {
        kind: config.attention(n_kv_heads=8, rope=rope, window=window if kind == SLIDING else 0) for kind in set(types)
    }
    return config.model([LayerSpec(mixer=kinds[kind], ffn=ffn, norm=norm) for kind in types], norm)


def seed_oss(config: ModelFields) -> ModelArch:
    norm, head_dim = config.rms(), None if config.is_null("head_dim") else 128
    mixer = config.attention(
        n_kv_heads=8, head_dim=head_dim, rope=config.rope(), qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
    )  # fmt: skip
    ffn = config.feed_forward(bias=config.flag("mlp_bias", False))
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm)] * config.n_layers, norm)


def smollm3(config: ModelFields) -> ModelArch:
    norm, rope, n_layers = config.rms(), config.rope(theta=2e6), config.n_layers
    bias, ffn = config.flag("attention_bias", False), config.feed_forward(bias=config.flag("mlp_bias", False))
    interval = config.integer("no_rope_layer_interval", 1, 1024, 4)
    rotated = config.values.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    if not isinstance(rotated, list) or len(rotated) < n_layers or not all(one in (0, 1) for one in rotated):
        raise config.error("no_rope_layers", f"at least num_hidden_layers = {n_layers} entries, each 0 or 1")
    is_sliding = config.flag("use_sliding_window", False) and "sliding_window" in config
    types = config.layer_types(SLIDING if is_sliding and not one else FULL for one in rotated[:n_layers])
    if SLIDING in types and not is_sliding:
        raise config.error("layer_types", "all full_attention, as use_sliding_window and sliding_window set no window")
    mixers = [
        config.attention(
            n_kv_heads=4, rope=rope if one else None, qkv_bias=bias, o_bias=bias,
            window=config.window() if kind == SLIDING else 0,
        )
        for one, kind in zip(rotated, types, strict=False)
    ]  # fmt: skip
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers], norm, tied=True)


def qwen2(config: ModelFields) -> ModelArch:
    norm, ffn, rope = config.rms(), config.feed_forward(), config.rope()
    mixers = [
        config.attention(n_kv_heads=32, rope=rope, qkv_bias=True, window=window) for window in _qwen_windows(config)
    ]
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers], norm)


def qwen3(config: ModelFields) -> ModelArch:
    norm, ffn, rope = config.rms(), config.feed_forward(), config.rope()
    bias, qk_norm = config.flag("attention_bias", False), QKNorm(norm=norm)
    mixers = [
        config.attention(
            n_kv_heads=32, head_dim=128, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm, window=window
        )
        for window in _qwen_windows(config)
    ]
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers], norm)


def _qwen_windows(config: ModelFields) -> list[int]:
    window = config.window() if config.flag("use_sliding_window", False) else 0
    types = config.layer_types()
    if not types:
        first = config.integer("max_window_layers", 0, 1024, 28)
        types = [SLIDING if layer >= first else FULL for layer in range(config.n_layers)]
    elif not window and SLIDING in types:
        raise config.error("layer_types", "all full_attention, as use_sliding_window is not true")
    return [window if kind == SLIDING else 0 for kind in types]


MIMO_MTP: Final = HeadLayout(
    what="MTP module", prefix="model.mtp_layers.{number}.", join="input_proj", feature_first=True,
    embedded_norm="token_layernorm", feature_norm="hidden_layernorm", norm="final_layernorm",
)  # fmt: skip
FAMILIES = (
    Family(
        name="llama", architecture="LlamaForCausalLM", model_type="llama", describe=llama,
        gguf=Gguf(
            architecture="llama", interleaved=True,
            variants={"expert_count": "MixtralForCausalLM", "attention.sliding_window": "MistralForCausalLM"},
        ),
    ),
    Family(
        name="mistral", architecture="MistralForCausalLM", model_type="mistral", describe=mistral,
        gguf=Gguf(architecture="llama", interleaved=True),
    ),
    Family(
        name="qwen2", architecture="Qwen2ForCausalLM", model_type="qwen2", describe=qwen2,
        gguf=Gguf(architecture="qwen2"),
    ),
    Family(
        name="qwen3", architecture="Qwen3ForCausalLM", model_type="qwen3", describe=qwen3,
        gguf=Gguf(architecture="qwen3"),
    ),
    Family(name="mimo", architecture="MiMoForCausalLM", model_type="mimo", describe=qwen2, mtp=MIMO_MTP),
    Family(name="ministral", architecture="MinistralForCausalLM", model_type="ministral", describe=ministral),
    Family(name="seed_oss", architecture="SeedOssForCausalLM", model_type="seed_oss", describe=seed_oss),
    Family(
        name="smollm3", architecture="SmolLM3ForCausalLM", model_type="smollm3", describe=smollm3,
        gguf=Gguf(architecture="smollm3", interleaved=True),
    ),
)  # fmt: skip
