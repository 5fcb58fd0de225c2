"""gpt-oss: windows in every second layer, sinks, and experts with biases and a gate that is cut."""

from __future__ import annotations

from typing import Final

from quire.config.arch import ModelArch
from quire.config.expert_fields import experts
from quire.config.experts import Gating
from quire.config.families.family import Family, Gguf, Order, Stored
from quire.config.layers import LayerSpec
from quire.config.model_fields import FULL, SLIDING, ModelFields

AT: Final = "model.layers.{}.mlp.experts."
STACKS: Final = {
    AT + "gate_up_proj": Stored("mlp.experts.{}.gate_up_proj.weight", Order.TRANSPOSED, alternates=True),
    AT + "gate_up_proj_bias": Stored("mlp.experts.{}.gate_up_proj.bias", Order.TRANSPOSED, alternates=True),
    AT + "down_proj": Stored("mlp.experts.{}.down_proj.weight", Order.TRANSPOSED),
    AT + "down_proj_bias": Stored("mlp.experts.{}.down_proj.bias"),
}


ROPE: Final = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Where a config.json says nothing of it."""


def gpt_oss(config: ModelFields) -> ModelArch:
    norm, bias = config.rms(default=1e-5), config.flag("attention_bias", True)
    if not any(name in config for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        config = config.with_values(rope_parameters=ROPE)
    rope = config.rope(theta=150_000.0)
    types = config.layer_types(FULL if layer % 2 else SLIDING for layer in range(config.n_layers))
    ffn = experts(
        config, n_experts=128, n_chosen=4, size=2880, size_key="intermediate_size", renormalise=True, bias=True,
        router_bias=True,
        gating=Gating(
            slope=config.number("swiglu_alpha", 1e-3, 1e3, 1.702), offset=1.0,
            limit=config.number("swiglu_limit", 1e-3, 1e6, 7.0),
        ),
    )  # fmt: skip
    mixers = {
        kind: config.attention(
            n_kv_heads=8, head_dim=64, rope=rope, qkv_bias=bias, o_bias=bias, sinks=True,
            window=config.window(128) if kind == SLIDING else 0,
        )
        for kind in set(types)
    }  # fmt: skip
    return config.model([LayerSpec(mixer=mixers[kind], ffn=ffn, norm=norm) for kind in types], norm)


GGUF: Final = Gguf(
    architecture="gpt-oss",
    keys={
        "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
        "intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window",
        "rope_theta": "rope.freq_base",
    },
    plain={
        "attention.sliding_window_pattern": (2,), "rope.freq_base_swa": (ROPE["rope_theta"],),
        "expert_gating_func": (3,),
    },
    yarn={"truncate": ROPE["truncate"]}, names={"post_attention_norm": "post_attention_layernorm"},
)  # fmt: skip
FAMILIES: Final = (
    Family(
        name="gpt_oss", architecture="GptOssForCausalLM", model_type="gpt_oss", describe=gpt_oss,
        names={"model.layers.{}.mlp.router": "mlp.gate"}, stacks=STACKS, gguf=GGUF,
    ),
)  # fmt: skip
