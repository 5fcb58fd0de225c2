"""Command-R (Cohere) and Command-R7B (Cohere 2): one LayerNorm for both parts, neighbours rotated as pairs."""

from __future__ import annotations

from typing import Any, Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.layers import LayerSpec, Placement, QKNorm, QKNormScope
from quire.config.model_fields import FULL, SLIDING, ModelFields


def cohere(config: ModelFields) -> ModelArch:
    qk_norm = None
    if config.flag("use_qk_norm", False):
        qk_norm = QKNorm(norm=config.layer_norm("layer_norm_eps", bias=False), scope=QKNormScope.HEADS)
    rope = config.rope(theta=500_000.0, interleaved=True)
    return _described(config, [FULL] * config.n_layers, {FULL: {"rope": rope, "qk_norm": qk_norm}})


def cohere2(config: ModelFields) -> ModelArch:
    config.only("use_qk_norm", False)
    config.only("use_gated_activation", True)
    config.only("use_parallel_block", True)
    config.only("rotary_pct", 1.0)
    config.only("position_embedding_type", "rope_gptj")
    config.only("order_of_interleaved_layers", "local_attn_first")
    every = config.integer("sliding_window_pattern", 1, 1024, 4)
    types = config.layer_types(SLIDING if (layer + 1) % every else FULL for layer in range(config.n_layers))
    kinds: dict[str, dict[str, Any]] = {FULL: {"rope": None}}
    if SLIDING in types:
        kinds[SLIDING] = {"rope": config.rope(interleaved=True), "window": config.window()}
    return _described(config, types, kinds)


def _described(config: ModelFields, types: list[str], kinds: dict[str, dict[str, Any]]) -> ModelArch:
    norm, bias = config.layer_norm("layer_norm_eps", bias=False), config.flag("attention_bias", False)
    ffn = config.feed_forward()
    layers = {
        kind: LayerSpec(
            mixer=config.attention(qkv_bias=bias, o_bias=bias, **more), ffn=ffn, norm=norm, placement=Placement.SHARED
        )
        for kind, more in kinds.items()
    }
    logits_scale = config.scale("logit_scale", 0.0625)
    return config.model([layers[kind] for kind in types], norm, tied=True, logits_scale=logits_scale)


FAMILIES: Final = (
    Family(name="cohere", architecture="CohereForCausalLM", model_type="cohere", describe=cohere),
    Family(name="cohere2", architecture="Cohere2ForCausalLM", model_type="cohere2", describe=cohere2),
)
