"""Mixtral: Mistral with experts."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.expert_fields import experts
from quire.config.families.family import Family
from quire.config.layers import LayerSpec
from quire.config.model_fields import ModelFields

NAMES: Final = {
    "model.layers.{}.block_sparse_moe.gate": "mlp.gate",
    "model.layers.{}.block_sparse_moe.experts.{}.w1": "mlp.experts.{}.gate_proj",
    "model.layers.{}.block_sparse_moe.experts.{}.w2": "mlp.experts.{}.down_proj",
    "model.layers.{}.block_sparse_moe.experts.{}.w3": "mlp.experts.{}.up_proj",
}


def mixtral(config: ModelFields) -> ModelArch:
    norm = config.rms(default=1e-5)
    window = config.window() if "sliding_window" in config else 0
    mixer = config.attention(n_kv_heads=8, rope=config.rope(theta=1e6), window=window)
    ffn = experts(config, n_experts=8, n_chosen=2, size=14336, size_key="intermediate_size", renormalise=True)
    return config.model([LayerSpec(mixer=mixer, ffn=ffn, norm=norm)] * config.n_layers, norm)


FAMILIES: Final = (
    Family(
        name="mixtral", architecture="MixtralForCausalLM", model_type="mixtral", describe=mixtral, names=NAMES,
    ),
)  # fmt: skip
