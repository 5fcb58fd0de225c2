"""Phi 1 and 2 (one LayerNorm for both parts), and Phi 3, 3.5 and 4: Llama with fused matrices and LongRoPE."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family, Gguf
from quire.config.layers import LayerSpec, Placement, QKNorm
from quire.config.model_fields import ModelFields

PHI_NAMES: Final = {
    "model.final_layernorm": "model.norm",
    "model.layers.{}.self_attn.dense": "self_attn.o_proj",
    "model.layers.{}.self_attn.q_layernorm": "self_attn.q_norm",
    "model.layers.{}.self_attn.k_layernorm": "self_attn.k_norm",
    "model.layers.{}.mlp.fc1": "mlp.up_proj",
    "model.layers.{}.mlp.fc2": "mlp.down_proj",
}
LONG_TYPES: Final = {"su": "longrope", "yarn": "longrope"}
"""What the first Phi 3 called LongRoPE."""


def phi(config: ModelFields) -> ModelArch:
    config.only("tie_word_embeddings", False)
    norm, rope = config.layer_norm("layer_norm_eps"), config.rope(partial=0.5)
    qk_norm = QKNorm(norm=norm) if config.flag("qk_layernorm", False) else None
    layer = LayerSpec(
        mixer=config.attention(rope=rope, qkv_bias=True, o_bias=True, qk_norm=qk_norm),
        ffn=config.feed_forward(default="gelu_new", gated=False, bias=True),
        norm=norm,
        placement=Placement.SHARED,
    )
    return config.model([layer] * config.n_layers, norm, head_bias=True)


def phi3(config: ModelFields) -> ModelArch:
    norm = config.rms(default=1e-5)
    rope = config.rope(original=4096, types=("default", "longrope"), other_types=LONG_TYPES)
    window = config.window() if "sliding_window" in config else 0
    layer = LayerSpec(mixer=config.attention(rope=rope, window=window), ffn=config.feed_forward(), norm=norm)
    return config.model([layer] * config.n_layers, norm)


FAMILIES: Final = (
    Family(name="phi", architecture="PhiForCausalLM", model_type="phi", describe=phi, names=PHI_NAMES),
    Family(
        name="phi3", architecture="Phi3ForCausalLM", model_type="phi3", describe=phi3,
        gguf=Gguf(
            architecture="phi3", names={"ffn_up": "mlp.gate_up_proj"},
            optional={"partial_rotary_factor": "rope.dimension_count"},
        ),
    ),
)  # fmt: skip
