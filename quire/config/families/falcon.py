"""Falcon: queries, keys and values in one matrix, attention beside the feed-forward, rotated positions or ALiBi.

transformers rounds what ALiBi adds to bfloat16, and so puts neighbours beyond position 256 at one distance. Here it is
not rounded: logits of longer texts differ a little from there on.
"""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family, Order, Stored
from quire.config.layers import LayerSpec, Placement
from quire.config.model_fields import ModelFields

KEYS: Final = {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"}
NAMES: Final[dict[str, str | Stored]] = {
    "transformer.word_embeddings": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.h.{}.input_layernorm": "input_layernorm",
    "transformer.h.{}.ln_attn": "input_layernorm",
    "transformer.h.{}.self_attention.query_key_value": Stored("self_attn.qkv_proj", Order.GROUPED),
    "transformer.h.{}.self_attention.dense": "self_attn.o_proj",
    "transformer.h.{}.post_attention_layernorm": "post_attention_layernorm",
    "transformer.h.{}.ln_mlp": "post_attention_layernorm",
    "transformer.h.{}.mlp.dense_h_to_4h": "mlp.up_proj",
    "transformer.h.{}.mlp.dense_4h_to_h": "mlp.down_proj",
}


def falcon(config: ModelFields) -> ModelArch:
    if "n_embed" in config:  # the older name, which wins in transformers too
        config = config.with_values(hidden_size=config.values["n_embed"])
    head_dim = config.hidden_size // config.integer("num_attention_heads", 1, config.hidden_size, bound="hidden_size")
    config.only("head_dim", head_dim)
    config.only("apply_residual_connection_post_layernorm", False)
    norm, bias = config.layer_norm("layer_norm_epsilon"), config.flag("bias", False)
    has_alibi, is_new = config.flag("alibi", False), config.flag("new_decoder_architecture", False)
    is_multi_query = config.flag("multi_query", True) and not is_new
    mixer = config.attention(
        grouped=is_new, n_kv_heads=1 if is_multi_query else None, qkv_bias=bias, o_bias=bias,
        rope=None if has_alibi else config.rope(), alibi=head_dim**-0.5 if has_alibi else 0.0,
    )  # fmt: skip
    ffn = config.feed_forward(
        act="activation", default="gelu", size=4 * config.hidden_size, gated=False, bias=bias
    )  # fmt: skip
    layer = LayerSpec(mixer=mixer, ffn=ffn, norm=norm, placement=_placement(config, is_new))
    return config.model([layer] * config.n_layers, norm, tied=True)


def _placement(config: ModelFields, is_new: bool) -> Placement:
    if is_new:
        config.only("parallel_attn", True)
        n_norms = config.integer("num_ln_in_parallel_attn", 1, 2, 2)
        return Placement.PARALLEL if n_norms == 2 else Placement.SHARED
    if not config.flag("parallel_attn", True):
        return Placement.BEFORE
    config.only("num_ln_in_parallel_attn", 1)
    return Placement.SHARED


FAMILIES: Final = (
    Family(
        name="falcon", architecture="FalconForCausalLM", model_type="falcon", describe=falcon, keys=KEYS, names=NAMES,
        assumed={"max_position_embeddings": 2048},
    ),
)  # fmt: skip
