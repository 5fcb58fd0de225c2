"""GPT-2 and what came from it with LayerNorm: OPT, GPT-NeoX (Pythia)."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family, Names, Order, Stored
from quire.config.layers import LayerSpec, Placement
from quire.config.model_fields import ModelFields

GPT2_KEYS: Final = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
GPT2_NAMES: Final[Names] = {
    "transformer.wte": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "transformer.ln_f": "model.norm",
    "transformer.h.{}.ln_1": "input_layernorm",
    "transformer.h.{}.attn.c_attn": Stored("self_attn.qkv_proj", Order.TRANSPOSED),
    "transformer.h.{}.attn.c_proj": Stored("self_attn.o_proj", Order.TRANSPOSED),
    "transformer.h.{}.ln_2": "post_attention_layernorm",
    "transformer.h.{}.mlp.c_fc": Stored("mlp.up_proj", Order.TRANSPOSED),
    "transformer.h.{}.mlp.c_proj": Stored("mlp.down_proj", Order.TRANSPOSED),
}
OPT_NAMES: Final[Names] = {
    "model.decoder.embed_tokens": "model.embed_tokens",
    "model.decoder.embed_positions": "model.embed_positions",
    "model.decoder.final_layer_norm": "model.norm",
    "model.decoder.layers.{}.self_attn_layer_norm": "input_layernorm",
    **{f"model.decoder.layers.{{}}.self_attn.{one}_proj": f"self_attn.{one}_proj" for one in "qkv"},
    "model.decoder.layers.{}.self_attn.out_proj": "self_attn.o_proj",
    "model.decoder.layers.{}.final_layer_norm": "post_attention_layernorm",
    "model.decoder.layers.{}.fc1": "mlp.up_proj",
    "model.decoder.layers.{}.fc2": "mlp.down_proj",
}
NEOX_NAMES: Final[Names] = {
    "gpt_neox.embed_in": "model.embed_tokens",
    "gpt_neox.final_layer_norm": "model.norm",
    "embed_out": "lm_head",
    "gpt_neox.layers.{}.input_layernorm": "input_layernorm",
    "gpt_neox.layers.{}.attention.query_key_value": Stored("self_attn.qkv_proj", Order.GROUPED),
    "gpt_neox.layers.{}.attention.dense": "self_attn.o_proj",
    "gpt_neox.layers.{}.post_attention_layernorm": "post_attention_layernorm",
    "gpt_neox.layers.{}.mlp.dense_h_to_4h": "mlp.up_proj",
    "gpt_neox.layers.{}.mlp.dense_4h_to_h": "mlp.down_proj",
}
NEOX_BUFFERS: Final = ("bias", "masked_bias", "rotary_emb.inv_freq")
OPT_OFFSET: Final = 2
"""Rows of OPT's table of positions before that of position 0."""


def gpt2(config: ModelFields) -> ModelArch:
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    norm = config.layer_norm("layer_norm_epsilon")
    mixer = config.attention(grouped=False, rope=None, qkv_bias=True, o_bias=True)
    ffn = config.feed_forward(
        act="activation_function", default="gelu_new", size=4 * config.hidden_size, gated=False, bias=True
    )
    layers = [LayerSpec(mixer=mixer, ffn=ffn, norm=norm)] * config.n_layers
    return config.model(layers, norm, tied=True, n_positions=config.max_position)


def opt(config: ModelFields) -> ModelArch:
    config.only("do_layer_norm_before", True)
    config.only("_remove_final_layer_norm", False)
    config.only("layer_norm_elementwise_affine", True)
    config.only("word_embed_proj_dim", config.hidden_size)
    norm, bias = config.layer_norm("layer_norm_eps"), config.flag("enable_bias", True)
    mixer = config.attention(grouped=False, rope=None, qkv_bias=bias, o_bias=bias)
    ffn = config.feed_forward(act="activation_function", default="relu", gated=False, bias=bias)
    layers = [LayerSpec(mixer=mixer, ffn=ffn, norm=norm)] * config.n_layers
    rows = config.max_position + OPT_OFFSET
    return config.model(layers, norm, tied=True, n_positions=rows, first_position=OPT_OFFSET)


def gpt_neox(config: ModelFields) -> ModelArch:
    norm, bias = config.layer_norm("layer_norm_eps"), config.flag("attention_bias", True)
    rope = config.rope(theta_key="rotary_emb_base", partial=0.25, partial_key="rotary_pct")
    layer = LayerSpec(
        mixer=config.attention(grouped=False, rope=rope, qkv_bias=bias, o_bias=bias),
        ffn=config.feed_forward(default="gelu", gated=False, bias=True),
        norm=norm,
        placement=Placement.PARALLEL if config.flag("use_parallel_residual", True) else Placement.BEFORE,
    )
    return config.model([layer] * config.n_layers, norm)


FAMILIES: Final = (
    Family(
        name="gpt2", architecture="GPT2LMHeadModel", model_type="gpt2", describe=gpt2, keys=GPT2_KEYS,
        names=GPT2_NAMES, computed=("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),
    ),
    Family(
        name="opt", architecture="OPTForCausalLM", model_type="opt", describe=opt,
        keys={"intermediate_size": "ffn_dim"}, names=OPT_NAMES,
    ),
    Family(
        name="gpt_neox", architecture="GPTNeoXForCausalLM", model_type="gpt_neox", describe=gpt_neox,
        names=NEOX_NAMES,
        computed=tuple(f"gpt_neox.layers.{{}}.attention.{one}" for one in NEOX_BUFFERS),
    ),
)  # fmt: skip
