"""Qwen3-Next: gated DeltaNet, and gated attention in every fourth layer."""

from __future__ import annotations

from typing import Final

from quire.config.arch import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, ModelArch
from quire.config.delta import DeltaSpec
from quire.config.expert_fields import every_step, experts
from quire.config.experts import SharedExpert
from quire.config.families.family import Family, Names, Order, Stored
from quire.config.gated_attention import GatedAttentionSpec
from quire.config.layers import FfnSpec, LayerSpec, MixerSpec, QKNorm
from quire.config.model_fields import ModelFields

LINEAR, FULL = "linear_attention", "full_attention"
MAX_KERNEL: Final = 64
DELTA, ATTENTION = "model.layers.{}.linear_attn", "model.layers.{}.self_attn"
NAMES: Final[Names] = {
    DELTA: "mixer",
    **{f"{DELTA}.{name}": f"mixer.{name}" for name in ("conv1d", "norm", "out_proj")},
    **{f"{DELTA}.{name}": Stored(f"mixer.{name}", Order.GROUPED) for name in ("in_proj_qkvz", "in_proj_ba")},
    f"{ATTENTION}.q_proj": Stored("self_attn.q_proj", Order.GROUPED),
}


def qwen3_next(config: ModelFields) -> ModelArch:
    norm, bias = config.rms(offset=1.0), config.flag("attention_bias", False)
    config.only("hidden_act", "silu")
    plain = config.attention(
        n_kv_heads=2, head_dim=256, rope=config.rope(partial=0.25), qkv_bias=bias, o_bias=bias,
        qk_norm=QKNorm(norm=norm),
    )  # fmt: skip
    attention = GatedAttentionSpec(**{name: getattr(plain, name) for name in plain.__struct_fields__})
    kinds: dict[str, MixerSpec] = {LINEAR: _delta(config), FULL: attention}
    ffns = _feed_forwards(config)
    layers = [LayerSpec(mixer=kinds[kind], ffn=ffn, norm=norm) for kind, ffn in zip(_types(config), ffns, strict=True)]
    return config.model(layers, norm)


def _delta(config: ModelFields) -> DeltaSpec:
    n_keys = config.integer("linear_num_key_heads", 1, MAX_HEADS, 16)
    n_values = config.integer("linear_num_value_heads", 1, MAX_HEADS, 32)
    if n_values % n_keys:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads = {n_keys}")
    return DeltaSpec(
        n_key_heads=n_keys, n_value_heads=n_values, key_dim=config.integer("linear_key_head_dim", 1, MAX_HEAD_DIM, 128),
        value_dim=config.integer("linear_value_head_dim", 1, MAX_HEAD_DIM, 128),
        kernel=config.integer("linear_conv_kernel_dim", 2, MAX_KERNEL, 4), eps=config.rms().eps,
    )  # fmt: skip


def _types(config: ModelFields) -> list[str]:
    types, n_layers = config.values.get("layer_types"), config.n_layers
    if types is None:
        every = config.integer("full_attention_interval", 1, 1024, 4)
        return [LINEAR if (layer + 1) % every else FULL for layer in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in (LINEAR, FULL) for kind in types):
        raise config.error("layer_types", f"num_hidden_layers = {n_layers} entries, each {LINEAR} or {FULL}")
    return types


def _feed_forwards(config: ModelFields) -> list[FfnSpec]:
    if config.values.get("num_experts") == 0:
        return [config.feed_forward(size=5632)] * config.n_layers
    shared = SharedExpert(size=config.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 512), gated=True)
    sparse = experts(
        config, n_experts=512, n_chosen=10, size=512, shared=shared, renormalise=config.flag("norm_topk_prob", True)
    )
    return every_step(config, sparse)


FAMILIES: Final = (
    Family(
        name="qwen3_next", architecture="Qwen3NextForCausalLM", model_type="qwen3_next", describe=qwen3_next,
        names=NAMES, unread=("mtp.",),
    ),
)  # fmt: skip
