"""LFM2: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.feed_forward import FeedForwardSpec
from quire.config.layers import LayerSpec, MixerSpec, QKNorm
from quire.config.model_fields import ModelFields
from quire.config.short_conv import ShortConvSpec

CONV, FULL = "conv", "full_attention"
MAX_KERNEL: Final = 64
NAMES: Final = {
    "model.embedding_norm": "model.norm",
    "model.layers.{}.operator_norm": "input_layernorm",
    "model.layers.{}.ffn_norm": "post_attention_layernorm",
    "model.layers.{}.conv.conv": "mixer.conv",
    "model.layers.{}.conv.in_proj": "mixer.in_proj",
    "model.layers.{}.conv.out_proj": "mixer.out_proj",
    "model.layers.{}.self_attn.out_proj": "self_attn.o_proj",
    "model.layers.{}.self_attn.q_layernorm": "self_attn.q_norm",
    "model.layers.{}.self_attn.k_layernorm": "self_attn.k_norm",
    "model.layers.{}.feed_forward.w1": "mlp.gate_proj",
    "model.layers.{}.feed_forward.w3": "mlp.up_proj",
    "model.layers.{}.feed_forward.w2": "mlp.down_proj",
}


def lfm2(config: ModelFields) -> ModelArch:
    norm = config.rms("norm_eps", 1e-5)
    attention = config.attention(n_kv_heads=8, rope=config.rope(theta=1e6), qk_norm=QKNorm(norm=norm))
    conv = ShortConvSpec(
        size=config.hidden_size, kernel=config.integer("conv_L_cache", 2, MAX_KERNEL, 3),
        bias=config.flag("conv_bias", False),
    )  # fmt: skip
    kinds: dict[str, MixerSpec] = {CONV: conv, FULL: attention}
    ffn = _feed_forward(config)
    return config.model(
        [LayerSpec(mixer=kinds[kind], ffn=ffn, norm=norm) for kind in _types(config)], norm,
        tied=config.flag("tie_embedding", True),
    )  # fmt: skip


def _types(config: ModelFields) -> list[str]:
    types, n_layers = config.values.get("layer_types"), config.n_layers
    if types is None:
        full = config.values.get("full_attn_idxs")
        if full is None:
            return [FULL] * n_layers
        if not isinstance(full, list) or not all(one in range(n_layers) for one in full):
            raise config.error("full_attn_idxs", f"a list of layers below num_hidden_layers = {n_layers}")
        return [FULL if layer in full else CONV for layer in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in (CONV, FULL) for kind in types):
        raise config.error("layer_types", f"num_hidden_layers = {n_layers} entries, each {CONV} or {FULL}")
    return types


def _feed_forward(config: ModelFields) -> FeedForwardSpec:
    """Its width may be given as that of a Llama, of which three matrices take two thirds, in whole blocks."""
    ffn = config.feed_forward(size=12288)
    if "block_ff_dim" in config:
        ffn = FeedForwardSpec(size=config.integer("block_ff_dim", 1, 2**20))
    if not config.flag("block_auto_adjust_ff_dim", True):
        return ffn
    size = int(2 * ffn.size / 3) * 1.0
    if not config.is_null("block_ffn_dim_multiplier"):
        block = config.integer("block_multiple_of", 1, 2**20, 256)
        size = -(-int(config.scale("block_ffn_dim_multiplier") * size) // block) * block
    return FeedForwardSpec(size=int(size))


FAMILIES: Final = (Family(name="lfm2", architecture="Lfm2ForCausalLM", model_type="lfm2", describe=lfm2, names=NAMES),)
