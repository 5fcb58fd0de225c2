"""EXAONE 4: norms after, queries and keys normed, and in models with windows no rotation where there is none."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.layers import LayerSpec, Placement, QKNorm
from quire.config.model_fields import FULL, SLIDING, ModelFields

NAMES: Final = {
    "model.layers.{}.post_attention_layernorm": "attention_post_norm",
    "model.layers.{}.post_feedforward_layernorm": "ffn_post_norm",
}


def exaone4(config: ModelFields) -> ModelArch:
    norm, rope = config.rms(default=1e-5), config.rope()
    window = 0 if config.is_null("sliding_window") else config.window()
    kinds = {
        kind: LayerSpec(
            mixer=config.attention(
                n_kv_heads=32, qk_norm=QKNorm(norm=norm), window=window if kind == SLIDING else 0,
                rope=rope if kind == SLIDING or not window else None,
            ),
            ffn=config.feed_forward(), norm=norm, placement=Placement.AFTER,
        )
        for kind in (FULL, SLIDING)
    }  # fmt: skip
    types = config.layer_types()
    if SLIDING in types and not window:
        raise config.error("sliding_window", "a number of tokens, as layer_types has sliding_attention")
    if not types and window:
        pattern = config.integer("sliding_window_pattern", 1, 1024, 4)
        types = [SLIDING if (layer + 1) % pattern else FULL for layer in range(config.n_layers)]
    return config.model([kinds[kind] for kind in types or [FULL] * config.n_layers], norm)


FAMILIES: Final = (
    Family(name="exaone4", architecture="Exaone4ForCausalLM", model_type="exaone4", describe=exaone4, names=NAMES),
)
