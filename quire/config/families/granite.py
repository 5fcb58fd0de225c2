"""Granite 3: Llama with four multipliers."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.layers import LayerSpec
from quire.config.model_fields import ModelFields


def granite(config: ModelFields) -> ModelArch:
    norm, bias = config.rms(), config.flag("attention_bias", False)
    layer = LayerSpec(
        mixer=config.attention(
            rope=config.rope(), scale=config.scale("attention_multiplier"), qkv_bias=bias, o_bias=bias
        ),
        ffn=config.feed_forward(bias=config.flag("mlp_bias", False)),
        norm=norm,
        residual_scale=config.scale("residual_multiplier"),
    )
    return config.model(
        [layer] * config.n_layers, norm, embedding_scale=config.scale("embedding_multiplier"),
        logits_scale=1 / config.scale("logits_scaling"),
    )  # fmt: skip


FAMILIES: Final = (Family(name="granite", architecture="GraniteForCausalLM", model_type="granite", describe=granite),)
