"""StableLM: LayerNorm around Llama's parts, a quarter of each head rotated, norms of queries and keys head by head."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.families.family import Family
from quire.config.layers import LayerSpec, Placement, QKNorm, QKNormScope
from quire.config.model_fields import ModelFields

NAMES: Final = {f"model.layers.{{}}.self_attn.{one}_layernorm.norms.{{}}": f"self_attn.{one}_norm.{{}}" for one in "qk"}


def stablelm(config: ModelFields) -> ModelArch:
    norm = config.layer_norm("layer_norm_eps")
    per_head = QKNorm(norm=config.layer_norm("layer_norm_eps", bias=False), scope=QKNormScope.APART)
    mixer = config.attention(
        n_kv_heads=32, rope=config.rope(partial=0.25), qkv_bias=config.flag("use_qkv_bias", False),
        qk_norm=per_head if config.flag("qk_layernorm", False) else None,
    )  # fmt: skip
    placement = Placement.SHARED if config.flag("use_parallel_residual", False) else Placement.BEFORE
    layer = LayerSpec(mixer=mixer, ffn=config.feed_forward(), norm=norm, placement=placement)
    return config.model([layer] * config.n_layers, norm)


FAMILIES: Final = (
    Family(name="stablelm", architecture="StableLmForCausalLM", model_type="stablelm", describe=stablelm, names=NAMES),
)
