"""StarCoder 2: LayerNorm with bias, a plain feed-forward, a window on every layer or on none."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.layers import LayerSpec
from quire.config.model_fields import ModelFields

NAMES: Final = {"model.layers.{}.mlp.c_fc": "mlp.up_proj", "model.layers.{}.mlp.c_proj": "mlp.down_proj"}


def starcoder2(config: ModelFields) -> ModelArch:
    config.choice("norm_type", ("layer_norm",), "layer_norm")
    config.choice("mlp_type", ("default",), "default")
    norm, bias = config.layer_norm("norm_epsilon"), config.flag("use_bias", True)
    window = config.window() if "sliding_window" in config else 0
    mixer = config.attention(n_kv_heads=2, rope=config.rope(), window=window, qkv_bias=bias, o_bias=bias)
    ffn = config.feed_forward(default="gelu_pytorch_tanh", gated=False, bias=bias)
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm)] * config.n_layers, norm, tied=True)


FAMILIES: Final = (
    Family(
        name="starcoder2", architecture="Starcoder2ForCausalLM", model_type="starcoder2", describe=starcoder2,
        names=NAMES,
    ),
)  # fmt: skip
