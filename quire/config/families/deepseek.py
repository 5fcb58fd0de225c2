"""DeepSeek-V2 and V3 (R1): latent attention, dense feed-forwards first and experts behind them, neighbours as pairs."""

from __future__ import annotations

from typing import Final

from quire.config.arch import MAX_HEADS, MAX_WIDTH, ModelArch
from quire.config.expert_fields import sigmoid_layers, softmax_layers
from quire.config.families.family import SHARED_NAMES, Family
from quire.config.latent import LatentAttentionSpec
from quire.config.layers import LayerSpec
from quire.config.model_fields import ModelFields

MAX_LINE: Final = 1024
"""Limit of kv_lora_rank, and of the dimensions of a head."""


def deepseek_v2(config: ModelFields) -> ModelArch:
    config.only("mlp_bias", False)
    mixer, norm = _mixer(config, interleaved=True), config.rms()
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for ffn in softmax_layers(config)], norm)


def deepseek_v3(config: ModelFields) -> ModelArch:
    mixer, norm = _mixer(config, interleaved=config.flag("rope_interleave", True)), config.rms()
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for ffn in sigmoid_layers(config)], norm)


def _mixer(config: ModelFields, *, interleaved: bool) -> LatentAttentionSpec:
    n_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    rope_dim = config.integer("qk_rope_head_dim", 2, MAX_LINE, 64)
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", "an even number")
    rope = config.rope(interleaved=interleaved)
    if rope.partial != 1.0:
        raise config.error("partial_rotary_factor", "1: qk_rope_head_dim says what is rotated")
    nope_dim = config.integer("qk_nope_head_dim", 1, MAX_LINE, 128)
    return LatentAttentionSpec(
        n_heads=n_heads,
        q_lora_rank=0 if config.is_null("q_lora_rank") else config.integer("q_lora_rank", 1, MAX_WIDTH, 1536),
        kv_lora_rank=config.integer("kv_lora_rank", 1, MAX_LINE, 512),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=config.integer("v_head_dim", 1, MAX_LINE, 128),
        scale=float((nope_dim + rope_dim) ** -0.5) * rope.softmax_factor,
        rope=rope,
        norm=config.rms(),
        bias=config.flag("attention_bias", False),
    )


FAMILIES: Final = (
    Family(
        name="deepseek_v2", architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", describe=deepseek_v2,
        names=SHARED_NAMES,
    ),
    Family(
        name="deepseek_v3", architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", describe=deepseek_v3,
        names=SHARED_NAMES,
    ),
)  # fmt: skip
