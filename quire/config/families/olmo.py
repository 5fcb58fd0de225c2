"""OLMo 1, 2 and 3: norms without weights before each part; then after it, with norms of q and k; then windows. And
OLMoE, with experts."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.expert_fields import experts
from quire.config.families.family import Family, Gguf
from quire.config.layers import LayerSpec, NormKind, NormSpec, Placement, QKNorm, QKNormScope
from quire.config.model_fields import FULL, SLIDING, ModelFields
from quire.config.rope import Rope

NAMES: Final = {
    "model.layers.{}.post_attention_layernorm": "attention_post_norm",
    "model.layers.{}.post_feedforward_layernorm": "ffn_post_norm",
}
THETA: Final = 500_000.0
EVERY: Final = 4
"""Of so many layers of OLMo 3 the last sees all tokens."""


def olmo(config: ModelFields) -> ModelArch:
    norm, bias = NormSpec(kind=NormKind.LAYER, eps=1e-5, weight=False), config.flag("attention_bias", False)
    clip = config.scale("clip_qkv") if "clip_qkv" in config else 0.0
    mixer = config.attention(rope=config.rope(), qkv_bias=bias, o_bias=bias, qkv_clip=clip)
    layer = LayerSpec(mixer=mixer, ffn=config.feed_forward(), norm=norm)
    return config.model([layer] * config.n_layers, norm)


def olmo2(config: ModelFields) -> ModelArch:
    return _norms_after(config, [FULL] * config.n_layers, {FULL: config.rope()})


def olmo3(config: ModelFields) -> ModelArch:
    types = config.layer_types(SLIDING if (layer + 1) % EVERY else FULL for layer in range(config.n_layers))
    ropes = {kind: config.rope(inside=kind, theta=THETA, scaled=kind == FULL) for kind in (FULL, SLIDING)}
    return _norms_after(config, types, ropes)


def olmoe(config: ModelFields) -> ModelArch:
    norm, bias = config.rms(default=1e-5), config.flag("attention_bias", False)
    mixer = config.attention(
        rope=config.rope(), qkv_bias=bias, o_bias=bias, qk_norm=QKNorm(norm=norm, scope=QKNormScope.ALL),
        qkv_clip=config.scale("clip_qkv") if "clip_qkv" in config else 0.0,
    )  # fmt: skip
    ffn = experts(config, n_experts=64, n_chosen=8, size=2048, size_key="intermediate_size")
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm)] * config.n_layers, norm)


def _norms_after(config: ModelFields, types: list[str], ropes: dict[str, Rope]) -> ModelArch:
    norm, bias = config.rms(default=1e-5), config.flag("attention_bias", False)
    kinds = {
        kind: LayerSpec(
            mixer=config.attention(
                rope=ropes[kind], window=config.window() if kind == SLIDING else 0, qkv_bias=bias, o_bias=bias,
                qk_norm=QKNorm(norm=norm, scope=QKNormScope.ALL),
            ),
            ffn=config.feed_forward(), norm=norm, placement=Placement.AFTER,
        )
        for kind in set(types)
    }  # fmt: skip
    return config.model([kinds[kind] for kind in types], norm)


FAMILIES: Final = (
    Family(name="olmo", architecture="OlmoForCausalLM", model_type="olmo", describe=olmo),
    Family(
        name="olmo2", architecture="Olmo2ForCausalLM", model_type="olmo2", describe=olmo2, names=NAMES,
        gguf=Gguf(architecture="olmo2", plain={"attention.sliding_window": (0,)}),
    ),
    Family(
        name="olmoe", architecture="OlmoeForCausalLM", model_type="olmoe", describe=olmoe,
        gguf=Gguf(
            architecture="olmoe", plain={"expert_weights_norm": (False,)},
            keys={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        ),
    ),
    Family(name="olmo3", architecture="Olmo3ForCausalLM", model_type="olmo3", describe=olmo3, names=NAMES),
)  # fmt: skip
