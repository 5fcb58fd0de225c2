"""GLM and GLM-4 (0414): half of each head rotated, neighbours as pairs; the latter with norms on both sides."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.layers import LayerSpec, Placement
from quire.config.model_fields import ModelFields

GLM4_NAMES: Final = {
    "model.layers.{}.post_self_attn_layernorm": "attention_post_norm",
    "model.layers.{}.post_mlp_layernorm": "ffn_post_norm",
}
EPS: Final = 1.5625e-7


def glm(config: ModelFields) -> ModelArch:
    return _described(config, Placement.BEFORE)


def glm4(config: ModelFields) -> ModelArch:
    return _described(config, Placement.BOTH)


def _described(config: ModelFields, placement: Placement) -> ModelArch:
    norm, rope = config.rms(default=EPS), config.rope(partial=0.5, interleaved=True)
    bias = config.flag("attention_bias", True)
    mixer = config.attention(n_kv_heads=2, head_dim=128, rope=rope, qkv_bias=bias)
    layer = LayerSpec(mixer=mixer, ffn=config.feed_forward(), norm=norm, placement=placement)
    return config.model([layer] * config.n_layers, norm)


FAMILIES: Final = (
    Family(name="glm", architecture="GlmForCausalLM", model_type="glm", describe=glm),
    Family(name="glm4", architecture="Glm4ForCausalLM", model_type="glm4", describe=glm4, names=GLM4_NAMES),
)
