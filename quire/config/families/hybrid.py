"""Mamba-2 beside attention: Bamba, and Granite 4, whose feed-forwards are experts or one that is called shared."""

from __future__ import annotations

from typing import Final

from quire.config.arch import MAX_WIDTH, ModelArch
from quire.config.expert_fields import experts
from quire.config.experts import SharedExpert
from quire.config.families.family import Family
from quire.config.families.granite import STACKS
from quire.config.feed_forward import FeedForwardSpec
from quire.config.layers import FfnSpec, LayerSpec, MixerSpec
from quire.config.mamba import MambaSpec
from quire.config.mamba_fields import mamba
from quire.config.model_fields import ModelFields

LINEAR, FULL = "linear_attention", "full_attention"
OLD: Final = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers before transformers 5."""
LAYER: Final = "model.layers.{}."
MIXER: Final = {
    LAYER + "mamba": "mixer",
    **{LAYER + "mamba." + name: "mixer." + name for name in ("in_proj", "conv1d", "norm", "out_proj")},
}
BAMBA: Final = {
    **MIXER,
    "model.final_layernorm": "model.norm",
    LAYER + "pre_ff_layernorm": "post_attention_layernorm",
    **{f"{LAYER}feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
GRANITE: Final = {
    **MIXER,
    LAYER + "block_sparse_moe.router.layer": "mlp.gate",
    LAYER + "shared_mlp.input_linear": "mlp.shared_expert.gate_up_proj",
    LAYER + "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
}


def bamba(config: ModelFields) -> ModelArch:
    norm, bias = config.rms("rms_norm_eps", 1e-5), config.flag("attention_bias", False)
    full = config.values.get("attn_layer_indices") or []
    if not isinstance(full, list) or not all(type(one) is int and 0 <= one < config.n_layers for one in full):
        raise config.error("attn_layer_indices", f"a list of layers below num_hidden_layers = {config.n_layers}")
    attention = config.attention(n_kv_heads=8, rope=config.rope(partial=0.5), qkv_bias=bias, o_bias=bias)
    ffn, scan = config.feed_forward(bias=config.flag("mlp_bias", False)), _mamba(config, norm.eps)
    mixers: list[MixerSpec] = [attention if layer in full else scan for layer in range(config.n_layers)]
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers], norm)


def granitemoehybrid(config: ModelFields) -> ModelArch:
    norm, bias, scale = config.rms(), config.flag("attention_bias", False), config.scale("residual_multiplier")
    kind = config.values.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config.error("position_embedding_type", "rope, nope or null")
    attention = config.attention(
        rope=config.rope() if kind == "rope" else None, scale=config.scale("attention_multiplier"), qkv_bias=bias,
        o_bias=bias,
    )  # fmt: skip
    kinds: dict[str, MixerSpec] = {LINEAR: _mamba(config, norm.eps), FULL: attention}
    ffn = _granite_ffn(config)
    layers = [LayerSpec(mixer=kinds[one], ffn=ffn, norm=norm, residual_scale=scale) for one in _types(config)]
    return config.model(
        layers, norm, embedding_scale=config.scale("embedding_multiplier"),
        logits_scale=1 / config.scale("logits_scaling"),
    )  # fmt: skip


def _granite_ffn(config: ModelFields) -> FfnSpec:
    config.only("hidden_act", "silu")
    size = config.integer("shared_intermediate_size", 1, MAX_WIDTH, 1024)
    if config.values.get("num_local_experts") == 0:
        return FeedForwardSpec(size=size, module="mlp.shared_expert")
    return experts(
        config, n_experts=8, n_chosen=2, size_key="intermediate_size", renormalise=True,
        shared=SharedExpert(size=size),
    )  # fmt: skip


def _types(config: ModelFields) -> list[str]:
    types, n_layers = config.values.get("layer_types", config.values.get("layers_block_type")), config.n_layers
    if types is None:
        return [LINEAR] * n_layers
    known = {LINEAR: LINEAR, FULL: FULL, **OLD}
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in known for kind in types):
        raise config.error("layer_types", f"num_hidden_layers = {n_layers} entries, each {LINEAR} or {FULL}")
    return [known[kind] for kind in types]


def _mamba(config: ModelFields, eps: float) -> MambaSpec:
    config.only("hidden_act", "silu")
    return mamba(
        config, heads="mamba_n_heads", head_dim="mamba_d_head", groups="mamba_n_groups", state="mamba_d_state",
        kernel="mamba_d_conv", expand="mamba_expand", bias="mamba_proj_bias", conv_bias="mamba_conv_bias",
        defaults=(128, 1, 256), eps=eps,
    )  # fmt: skip


FAMILIES: Final = (
    Family(name="bamba", architecture="BambaForCausalLM", model_type="bamba", describe=bamba, names=BAMBA),
    Family(
        name="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM", model_type="granitemoehybrid",
        describe=granitemoehybrid, names=GRANITE, stacks=STACKS,
    ),
)  # fmt: skip
