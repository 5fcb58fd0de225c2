"""GLM and GLM-4 (0414): half of each head rotated, neighbours as pairs; the latter with norms on both sides. And
GLM-4.5, with experts, halves as pairs."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.expert_fields import sigmoid_layers
from quire.config.families.family import SHARED_NAMES, Family, Gguf
from quire.config.layers import LayerSpec, Placement, QKNorm
from quire.config.model_fields import MTP_MODULES, ModelFields

GLM4_NAMES: Final = {
    "model.layers.{}.post_self_attn_layernorm": "attention_post_norm",
    "model.layers.{}.post_mlp_layernorm": "ffn_post_norm",
}
EPS: Final = 1.5625e-7


def glm(config: ModelFields) -> ModelArch:
    return _described(config, Placement.BEFORE)


def glm4(config: ModelFields) -> ModelArch:
    return _described(config, Placement.BOTH)


def glm4_moe(config: ModelFields) -> ModelArch:
    norm, bias = config.rms(default=1e-5), config.flag("attention_bias", False)
    mixer = config.attention(
        n_kv_heads=8, rope=config.rope(partial=0.5), qkv_bias=bias,
        qk_norm=QKNorm(norm=norm) if config.flag("use_qk_norm", False) else None,
    )  # fmt: skip
    ffns = sigmoid_layers(config, n_experts=128, size=1408, groups=(1, 1), n_dense=1, scale=1.0)
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for ffn in ffns], norm)


def _described(config: ModelFields, placement: Placement) -> ModelArch:
    norm, rope = config.rms(default=EPS), config.rope(partial=0.5, interleaved=True)
    bias = config.flag("attention_bias", True)
    mixer = config.attention(n_kv_heads=2, head_dim=128, rope=rope, qkv_bias=bias)
    layer = LayerSpec(mixer=mixer, ffn=config.feed_forward(), norm=norm, placement=placement)
    return config.model([layer] * config.n_layers, norm)


MOE_GGUF: Final = Gguf(
    architecture="glm4moe", names={"post_attention_norm": "post_attention_layernorm"},
    keys={
        "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count", "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
    },
    optional={"partial_rotary_factor": "rope.dimension_count", MTP_MODULES: "nextn_predict_layers"},
    plain={"expert_gating_func": (2,)},
)  # fmt: skip
FAMILIES: Final = (
    Family(name="glm", architecture="GlmForCausalLM", model_type="glm", describe=glm),
    Family(
        name="glm4", architecture="Glm4ForCausalLM", model_type="glm4", describe=glm4, names=GLM4_NAMES,
        gguf=Gguf(
            architecture="glm4", names={"ffn_up": "mlp.gate_up_proj"},
            optional={"partial_rotary_factor": "rope.dimension_count"},
        ),
    ),
    Family(
        name="glm4_moe", architecture="Glm4MoeForCausalLM", model_type="glm4_moe", describe=glm4_moe,
        names=SHARED_NAMES, gguf=MOE_GGUF,
    ),
)  # fmt: skip
