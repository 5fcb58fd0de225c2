"""Gemma 1, 2 and 3 (text): norms with 1 + w, scaled embeddings; from 2 on norms on both sides, alternating windows."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.families.family import Family, Gguf, Names
from quire.config.layers import Activation, LayerSpec, Placement, QKNorm
from quire.config.model_fields import FULL, SLIDING, ModelFields
from quire.config.rope import Rope

NAMES: Final[Names] = {
    "model.layers.{}.post_attention_layernorm": "attention_post_norm",
    "model.layers.{}.pre_feedforward_layernorm": "post_attention_layernorm",
    "model.layers.{}.post_feedforward_layernorm": "ffn_post_norm",
}


def gemma(config: ModelFields) -> ModelArch:
    norm, bias = config.rms(offset=1.0), config.flag("attention_bias", False)
    mixer = config.attention(n_kv_heads=16, head_dim=256, rope=config.rope(), qkv_bias=bias, o_bias=bias)
    ffn = config.feed_forward(default="gelu_pytorch_tanh")
    if ffn.activation is Activation.GELU:  # the first checkpoints say so, and mean its approximation
        ffn = msgspec.structs.replace(ffn, activation=Activation.GELU_TANH)
    layer = LayerSpec(mixer=mixer, ffn=ffn, norm=norm)
    return config.model([layer] * config.n_layers, norm, tied=True, embedding_scale=config.hidden_size**0.5)


def gemma2(config: ModelFields) -> ModelArch:
    types = config.layer_types((SLIDING, FULL)[layer % 2] for layer in range(config.n_layers))
    ropes = dict.fromkeys((FULL, SLIDING), config.rope())
    soft_cap = config.optional("attn_logit_softcapping", 50.0)
    return _two_sided(config, types, ropes, 30.0, soft_cap=soft_cap)


def gemma3(config: ModelFields) -> ModelArch:
    config.only("attn_logit_softcapping", 0)
    pattern = config.integer("sliding_window_pattern", 1, 1024, 6)
    types = config.layer_types(SLIDING if (layer + 1) % pattern else FULL for layer in range(config.n_layers))
    ropes = {
        FULL: config.rope(inside=FULL, theta=1e6),
        SLIDING: config.rope(inside=SLIDING, theta_key="rope_local_base_freq", scaled=False),
    }
    return _two_sided(config, types, ropes, 0.0, qk_norm=QKNorm(norm=config.rms(offset=1.0)))


def _two_sided(
    config: ModelFields, types: list[str], ropes: dict[str, Rope], final_cap: float, **more: Any
) -> ModelArch:
    norm, bias = config.rms(offset=1.0), config.flag("attention_bias", False)
    scale = config.number("query_pre_attn_scalar", 1e-6, 1e6, 256) ** -0.5
    ffn = config.feed_forward(act="hidden_activation", default="gelu_pytorch_tanh")
    kinds = {
        kind: LayerSpec(
            mixer=config.attention(
                n_kv_heads=4, head_dim=256, scale=scale, rope=ropes[kind], qkv_bias=bias, o_bias=bias,
                window=config.window() if kind == SLIDING else 0, **more,
            ),
            ffn=ffn, norm=norm, placement=Placement.BOTH,
        )
        for kind in set(types)
    }  # fmt: skip
    return config.model(
        [kinds[kind] for kind in types], norm, tied=True, embedding_scale=config.hidden_size**0.5,
        logits_soft_cap=config.optional("final_logit_softcapping", final_cap),
    )  # fmt: skip


CAP: Final = "final_logit_softcapping"
FAMILIES: Final = (
    Family(
        name="gemma", architecture="GemmaForCausalLM", model_type="gemma", describe=gemma,
        gguf=Gguf(architecture="gemma"),
    ),
    Family(
        name="gemma2", architecture="Gemma2ForCausalLM", model_type="gemma2", describe=gemma2, names=NAMES,
        gguf=Gguf(
            architecture="gemma2", plain={"attention.sliding_window_pattern": (2,)}, n_layers_by_width=46,
            optional={
                "sliding_window": "attention.sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
                CAP: CAP,
            },
        ),
    ),
    Family(
        name="gemma3", architecture="Gemma3ForCausalLM", model_type="gemma3_text", describe=gemma3, names=NAMES,
        gguf=Gguf(
            architecture="gemma3", keys={"sliding_window": "attention.sliding_window"},
            optional={"rope_local_base_freq": "rope.freq_base_swa", CAP: CAP},
            plain={"attention.sliding_window_pattern": (6,)}, n_layers_by_width=62,
        ),
    ),
)  # fmt: skip
