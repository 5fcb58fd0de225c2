"""Shapes whose training is published, for the tests of this folder."""

from __future__ import annotations

import functools

from quire.config.arch import ModelArch
from quire.config.model import parse_arch

GPTS = {"22B": (6144, 64, 48), "175B": (12288, 96, 96), "530B": (20480, 128, 105), "1T": (25600, 160, 128)}
"""Korthikanti et al. 2022, table 3: width, heads, layers; 2,048 tokens, a vocabulary of 51,200."""


@functools.cache
def gpt(name: str) -> ModelArch:
    hidden, n_heads, n_layers = GPTS[name]
    return parse_arch({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": hidden, "n_head": n_heads,
        "n_layer": n_layers, "vocab_size": 51200, "n_positions": 2048,
    })  # fmt: skip


def llama_2(hidden: int, n_heads: int, n_kv_heads: int, n_layers: int, inner: int) -> ModelArch:
    return parse_arch({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "vocab_size": 32000,
        "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "num_hidden_layers": n_layers,
        "intermediate_size": inner, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    })  # fmt: skip


LLAMA_2 = {
    "7B": llama_2(4096, 32, 32, 32, 11008),
    "13B": llama_2(5120, 40, 40, 40, 13824),
    "70B": llama_2(8192, 64, 8, 80, 28672),
}  # fmt: skip
MIXTURES = {
    "8x7B": parse_arch({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "vocab_size": 32000,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    }),
    "671B": parse_arch({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu",
    }),
}  # fmt: skip
