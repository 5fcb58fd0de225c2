"""Granite 3: Llama with four multipliers; and its mixtures of experts."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.expert_fields import experts
from quire.config.families.family import Family, Gguf, Stored
from quire.config.layers import FfnSpec, LayerSpec
from quire.config.model_fields import ModelFields

STACKS: Final = {
    "model.layers.{}.block_sparse_moe.input_linear.weight": Stored("mlp.experts.{}.gate_up_proj.weight"),
    "model.layers.{}.block_sparse_moe.output_linear.weight": Stored("mlp.experts.{}.down_proj.weight"),
}


def granite(config: ModelFields) -> ModelArch:
    return _described(config, config.feed_forward(bias=config.flag("mlp_bias", False)))


def granitemoe(config: ModelFields) -> ModelArch:
    ffn = experts(config, n_experts=8, n_chosen=2, size_key="intermediate_size", renormalise=True)
    return _described(config, ffn)


def _described(config: ModelFields, ffn: FfnSpec) -> ModelArch:
    norm, bias = config.rms(), config.flag("attention_bias", False)
    layer = LayerSpec(
        mixer=config.attention(
            rope=config.rope(), scale=config.scale("attention_multiplier"), qkv_bias=bias, o_bias=bias
        ),
        ffn=ffn,
        norm=norm,
        residual_scale=config.scale("residual_multiplier"),
    )
    return config.model(
        [layer] * config.n_layers, norm, embedding_scale=config.scale("embedding_multiplier"),
        logits_scale=1 / config.scale("logits_scaling"),
    )  # fmt: skip


ROTATED: Final = {"rope.scaling.finetuned": (True,)}
"""The key by which llama.cpp leaves out the rotation."""
SCALES: Final = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
"""Of their GGUF files."""
FAMILIES: Final = (
    Family(
        name="granite", architecture="GraniteForCausalLM", model_type="granite", describe=granite,
        gguf=Gguf(architecture="granite", interleaved=True, keys=SCALES, plain=ROTATED),
    ),
    Family(
        name="granitemoe", architecture="GraniteMoeForCausalLM", model_type="granitemoe", describe=granitemoe,
        names={"model.layers.{}.block_sparse_moe.router.layer": "mlp.gate"}, stacks=STACKS,
        gguf=Gguf(
            architecture="granitemoe", interleaved=True, plain=ROTATED,
            keys={**SCALES, "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        ),
    ),
)  # fmt: skip
