"""Mixtral, Phi-3.5-MoE and MiniMax-M2: experts under Mixtral's names, each routed in its own way."""

from __future__ import annotations

from typing import Final

from quire.config.arch import MAX_HEAD_DIM, ModelArch
from quire.config.attention import AttentionSpec
from quire.config.expert_fields import experts
from quire.config.experts import Scores
from quire.config.families.family import Family, Gguf
from quire.config.layers import FfnSpec, LayerSpec, NormSpec, QKNorm, QKNormScope
from quire.config.model_fields import ModelFields

AT: Final = "model.layers.{}.block_sparse_moe"
NAMES: Final = {
    AT: "mlp.gate",
    AT + ".gate": "mlp.gate",
    AT + ".experts.{}.w1": "mlp.experts.{}.gate_proj",
    AT + ".experts.{}.w2": "mlp.experts.{}.down_proj",
    AT + ".experts.{}.w3": "mlp.experts.{}.up_proj",
}


def mixtral(config: ModelFields) -> ModelArch:
    norm = config.rms(default=1e-5)
    mixer = config.attention(n_kv_heads=8, rope=config.rope(theta=1e6), window=_window(config))
    ffn = experts(config, n_experts=8, n_chosen=2, size=14336, size_key="intermediate_size", renormalise=True)
    return _described(config, mixer, ffn, norm)


def phimoe(config: ModelFields) -> ModelArch:
    config.only("num_experts_per_tok", 2)
    norm, bias = config.layer_norm("rms_norm_eps"), config.flag("attention_bias", False)
    rope = config.rope(theta=1e6, types=("default", "longrope"))
    mixer = config.attention(n_kv_heads=8, rope=rope, qkv_bias=bias, o_bias=bias, window=_window(config))
    ffn = experts(
        config, n_experts=16, n_chosen=2, size=6400, size_key="intermediate_size", scores=Scores.SPARSE_MIXER,
        renormalise=False, routing={"mixer_margin": 2 * config.number("router_jitter_noise", 0.0, 1.0, 0.01)},
    )  # fmt: skip
    return _described(config, mixer, ffn, norm, head_bias=config.flag("lm_head_bias", False))


def minimax_m2(config: ModelFields) -> ModelArch:
    for name, value in (("scoring_func", "sigmoid"), ("use_routing_bias", True), ("use_qk_norm", True)):
        config.only(name, value)
    config.only("shared_intermediate_size", 0)
    norm, head_dim = config.rms(), config.integer("head_dim", 2, MAX_HEAD_DIM, 128)
    rotated = config.integer("rotary_dim", 2, head_dim, head_dim, bound="head_dim")
    mixer = config.attention(
        n_kv_heads=8, head_dim=128, rope=config.rope(theta=5e6, partial=rotated / head_dim),
        qk_norm=QKNorm(norm=norm, scope=QKNormScope.ALL),
    )  # fmt: skip
    ffn = experts(
        config, n_experts=256, n_chosen=8, size=1536, size_key="intermediate_size", scores=Scores.SIGMOID,
        renormalise=True, correction_bias=True,
    )  # fmt: skip
    return _described(config, mixer, ffn, norm)


def _window(config: ModelFields) -> int:
    return config.window() if "sliding_window" in config else 0


def _described(
    config: ModelFields, mixer: AttentionSpec, ffn: FfnSpec, norm: NormSpec, *, head_bias: bool = False
) -> ModelArch:
    layer = LayerSpec(mixer=mixer, ffn=ffn, norm=norm)
    return config.model([layer] * config.n_layers, norm, head_bias=head_bias)


FAMILIES: Final = (
    Family(
        name="mixtral", architecture="MixtralForCausalLM", model_type="mixtral", describe=mixtral, names=NAMES,
        gguf=Gguf(
            architecture="llama", interleaved=True,
            keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        ),
    ),
    Family(name="phimoe", architecture="PhimoeForCausalLM", model_type="phimoe", describe=phimoe, names=NAMES),
    Family(
        name="minimax_m2", architecture="MiniMaxM2ForCausalLM", model_type="minimax_m2", describe=minimax_m2,
        names=NAMES,
    ),
)  # fmt: skip
