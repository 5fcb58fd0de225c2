"""Nemotron and Minitron: LayerNorm of 1 + w, a plain feed-forward of squared ReLU, half of each head rotated."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.layers import LayerSpec
from quire.config.model_fields import ModelFields


def nemotron(config: ModelFields) -> ModelArch:
    norm, bias = config.layer_norm("norm_eps", offset=1.0), config.flag("attention_bias", False)
    mixer = config.attention(rope=config.rope(partial=0.5), qkv_bias=bias, o_bias=bias)
    ffn = config.feed_forward(default="relu2", gated=False, bias=config.flag("mlp_bias", False))
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm)] * config.n_layers, norm)


FAMILIES: Final = (
    Family(name="nemotron", architecture="NemotronForCausalLM", model_type="nemotron", describe=nemotron),
)
