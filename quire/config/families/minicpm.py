"""MiniCPM: Llama with factors on embeddings, residuals and logits, as its training by muP needs (Hu et al. 2024)."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.layers import LayerSpec
from quire.config.model_fields import ModelFields


def minicpm(config: ModelFields) -> ModelArch:
    config.only("attention_bias", False)
    config.only("num_experts", 0)
    if "sparse_config" in config:
        raise config.error("sparse_config", "absent: sparse attention is not built, take it out to attend densely")
    norm, n_layers = config.rms(), config.n_layers
    layer = LayerSpec(
        mixer=config.attention(rope=config.rope()), ffn=config.feed_forward(), norm=norm,
        residual_scale=config.scale("scale_depth") / n_layers**0.5,
    )  # fmt: skip
    return config.model(
        [layer] * n_layers, norm, tied=True, embedding_scale=config.scale("scale_emb"),
        logits_scale=config.scale("dim_model_base") / config.hidden_size,
    )  # fmt: skip


FAMILIES: Final = (
    Family(
        name="minicpm", architecture="MiniCPMForCausalLM", model_type="minicpm", describe=minicpm,
        assumed={"max_position_embeddings": 2048},
    ),
)  # fmt: skip
