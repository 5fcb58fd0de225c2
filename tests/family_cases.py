"""A case for every family and each part that its config.json can switch, and random checkpoints of them."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from quire.config.experts import CORRECTION
from quire.config.model_fields import FULL, SLIDING

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
"""Overridden by each case."""
IDS = torch.randint(1, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 2}
OLMO3 = {"num_hidden_layers": 5, "sliding_window": 9}
COHERE2 = {"num_hidden_layers": 5, "sliding_window": 9, "logit_scale": 0.25}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}
GRANITE = {
    "embedding_multiplier": 12.0, "logits_scaling": 0.5, "residual_multiplier": 0.22, "attention_multiplier": 0.05,
}  # fmt: skip
GLM = {"head_dim": 32, "eos_token_id": 2}
DIVISORS = [1.0 + i / 4 for i in range(8)]
LONG = {"rope_type": "longrope", "short_factor": DIVISORS, "long_factor": [2 * one for one in DIVISORS]}
ALIBI = {"alibi": True, "attn_implementation": "sdpa"}
"""Written out, transformers' attention adds Falcon's slopes twice."""
GRANITE_MUP = {
    "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 3**0.5, "logits_scaling": 64 / 32,
    "attention_multiplier": 16**-0.5,
}  # fmt: skip
MINICPM = {
    "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4,
    "dim_model_base": 32,
}  # fmt: skip
"""What takes the place of `GRANITE_MUP`: transformers has no MiniCPM, and its Granite computes the same."""
OWN_NAMES: dict[str, dict[str, Any]] = {
    "minicpm": MINICPM,
    "mimo": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"},
}
"""Family that transformers has not → what its config.json has besides that of the one that computes the same."""
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5e4, "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0], "long_factor": [4.0] * 8,
}  # fmt: skip
QWEN_NEXT = {
    "layer_types": ["linear_attention", FULL, "linear_attention"], "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
MAMBA2 = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "chunk_size": 16, "hidden_size": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 16}
BAMBA = {"attn_layer_indices": [0, 2]}
GRANITE_4 = {"layer_types": ["linear_attention", FULL, "linear_attention"], "shared_intermediate_size": 48}
LFM2 = {"conv_L_cache": 3, "block_multiple_of": 32}
MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
OLMOE = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
GLM_MOE = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "num_mtp_layers": 0,
}  # fmt: skip
GPT_OSS = {
    **MIXTRAL, "intermediate_size": 32, "head_dim": 32, "sliding_window": 9,
    "rope_parameters": {**YARN, "truncate": False},
}  # fmt: skip
QWEN2_MOE = {**MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}
QWEN3_MOE = {**MOE, "head_dim": 32}
RECURRENT = {"bamba", "granitemoehybrid", "lfm2", "mamba2", "qwen3_next"}
"""Families with states, which take no drafts."""
GPT_OSS_LIMIT = 7.0
"""What gpt-oss was released with."""
TYPES = ["full_attention", "sliding_attention", "full_attention"]
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}),
    "deepseek_v2-lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "rope_parameters": DEEPSEEK_YARN, "attention_bias": True}),
    "deepseek_v3-dense": (
        "DeepseekV3",
        {**LATENT, "first_k_dense_replace": 3, "q_lora_rank": None, "rope_interleave": False},
    ),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma2-no-caps": ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 16}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": 9, "sliding_window_pattern": 2}),
    "gemma3-cap": ("Gemma3", {"head_dim": 32, "sliding_window": 9, "final_logit_softcapping": 9.0}),
    "gpt2": ("GPT2", GPT2),
    "gpt2-inner": ("GPT2", {**GPT2, "n_inner": 48, "activation_function": "relu", "tie_word_embeddings": False}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt-no-bias": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "olmo": ("Olmo", {}),
    "olmo-clip": ("Olmo", {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3": ("Olmo3", {**OLMO3, "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default"}}}),
    "olmo3-types": ("Olmo3", {**OLMO3, "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL]}),
    "granite": ("Granite", GRANITE),
    "granite-bias": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite-ones": ("Granite", {}),
    "glm": ("Glm", GLM),
    "glm-no-bias": ("Glm", {**GLM, "attention_bias": False, "rope_parameters": {"partial_rotary_factor": 1.0}}),
    "glm4": ("Glm4", GLM),
    "glm4-no-bias": ("Glm4", {**GLM, "head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}),
    "phi": ("Phi", {}),
    "phi-qk-norm": ("Phi", {"qk_layernorm": True, "num_key_value_heads": 4}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 9}),
    "phi3-short": ("Phi3", {"original_max_position_embeddings": 128, "rope_parameters": {**LONG, "factor": 4.0}}),
    "phi3-long": ("Phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONG}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"partial_rotary_factor": 0.75}, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere-qk-norm": ("Cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 2.0}),
    "cohere-untied": ("Cohere", {"tie_word_embeddings": False, "logit_scale": 1.0}),
    "cohere2": ("Cohere2", COHERE2),
    "cohere2-types": ("Cohere2", {**COHERE2, "layer_types": [FULL, SLIDING, FULL, FULL, SLIDING]}),
    "cohere2-full": ("Cohere2", {"layer_types": [FULL] * 3, "attention_bias": True, "logit_scale": 1.0}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": 9, "use_bias": False, "tie_word_embeddings": False}),
    "stablelm": ("StableLm", {}),
    "stablelm-bias": ("StableLm", {"use_qkv_bias": True, "tie_word_embeddings": True}),
    "stablelm-qk_norm": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "falcon": ("Falcon", {}),
    "falcon-sequential": ("Falcon", {"parallel_attn": False, "bias": True, "ffn_hidden_size": 96}),
    "falcon-many-keys": ("Falcon", {"multi_query": False, "tie_word_embeddings": False}),
    "falcon-new": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-new-one-norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-alibi": ("Falcon", {**ALIBI, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon-alibi-parallel": ("Falcon", {**ALIBI, "num_attention_heads": 8}),
    "mimo": ("Qwen2", {}),
    "minicpm": ("Granite", {"tie_word_embeddings": True, **GRANITE_MUP}),
    "minicpm-longrope": (
        "Granite",
        {**GRANITE_MUP, "rope_parameters": LONGROPE, "num_key_value_heads": 4},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4-no-windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ministral": ("Ministral", {"sliding_window": 9, "head_dim": 32}),
    "ministral-types": ("Ministral", {"sliding_window": 9, "head_dim": 16, "layer_types": TYPES}),
    "seed_oss": ("SeedOss", {"head_dim": 32}),
    "seed_oss-biases": (
        "SeedOss",
        {"head_dim": None, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "smollm3-biases": ("SmolLM3", {"layer_types": ["full_attention"] * 3, "mlp_bias": True, "head_dim": 32}),
    "nemotron": ("Nemotron", {}),
    "nemotron-attention_bias": ("Nemotron", {"attention_bias": True, "tie_word_embeddings": True}),
    "nemotron-mlp_bias": (
        "Nemotron",
        {"mlp_bias": True, "hidden_act": "gelu", "head_dim": 32, "num_key_value_heads": 4},
    ),
    "lfm2": ("Lfm2", {**LFM2, "layer_types": ["conv", FULL, "conv"]}),
    "lfm2-bias": ("Lfm2", {**LFM2, "full_attn_idxs": [1], "conv_bias": True, "block_multiple_of": 16}),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2-bias": ("Mamba2", {**MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "bamba-bias": ("Bamba", {**MAMBA, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, **BAMBA}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**MAMBA, **GRANITE, **MIXTRAL, **GRANITE_4}),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        {**MAMBA, **GRANITE, **GRANITE_4, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "qwen3_next": ("Qwen3Next", {**QWEN_NEXT, **MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen3_next-dense": ("Qwen3Next", {**QWEN_NEXT, "num_experts": 0}),
    "mixtral": ("Mixtral", MIXTRAL),
    "qwen2_moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen3_moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe-dense-layers": ("Qwen3Moe", {**QWEN3_MOE, "decoder_sparse_step": 2, "attention_bias": True}),
    "mixtral-window": ("Mixtral", {**MIXTRAL, "sliding_window": 9}),
    "olmoe": ("Olmoe", OLMOE),
    "olmoe-clip": ("Olmoe", {**OLMOE, "clip_qkv": 0.8, "norm_topk_prob": True}),
    "granitemoe": ("GraniteMoe", {**GRANITE, **MIXTRAL}),
    "phimoe": ("Phimoe", {**MIXTRAL, "attention_bias": True, "lm_head_bias": True}),
    "phimoe-longrope": (
        "Phimoe",
        {**MIXTRAL, "rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.3}},
    ),
    "glm4_moe": ("Glm4Moe", {**GLM_MOE, "use_qk_norm": True}),
    "glm4_moe-groups": (
        "Glm4Moe",
        {**GLM_MOE, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
    ),
    "minimax_m2": ("MiniMaxM2", {**MIXTRAL, "head_dim": 32, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "gpt_oss": ("GptOss", {**GPT_OSS, "swiglu_limit": 0.7}),
    "gpt_oss-full": ("GptOss", {**GPT_OSS, "layer_types": [FULL] * 3, "attention_bias": False}),
    "nemotron-partial": ("Nemotron", {"rope_parameters": {"partial_rotary_factor": 0.25}, "norm_eps": 0.01}),
}


@contextlib.contextmanager
def _hidden(packages: tuple[str, ...]) -> Iterator[None]:
    """Importing one of them fails meanwhile."""
    found = {name: sys.modules.pop(name) for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(found)


with _hidden(("fla", "mamba_ssm", "causal_conv1d")):
    # A model's file takes their GPU kernels as it is imported, if they are installed, and calls them on a CPU as well.
    for _name in RECURRENT:
        getattr(transformers, f"{CASES[_name][0]}ForCausalLM")


def refuse_old_oracle(config: transformers.PreTrainedConfig) -> None:
    """Fail with words where the transformers that is installed would compute a wrong model of `config`."""
    n_groups = getattr(config, "n_groups", getattr(config, "mamba_n_groups", 1))
    if n_groups > 1:
        _need((5, 23), f"takes the gated norm of Mamba-2 over all of its {n_groups} groups at once")
    limit = getattr(config, "swiglu_limit", GPT_OSS_LIMIT)
    if limit != GPT_OSS_LIMIT:
        _need((5, 19), f"computes gpt-oss with a swiglu_limit of {GPT_OSS_LIMIT}, whatever config.json says ({limit})")


def _need(release: tuple[int, int], wrong: str) -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) < release:
        least = ".".join(map(str, release))
        pytest.fail(f"transformers {transformers.__version__} {wrong}: compare with {least} or newer", pytrace=False)


def random_checkpoint(
    folder: pathlib.Path,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard: str = "1GB",
    **fields: Any,
) -> transformers.PreTrainedModel:
    """Write a random checkpoint with transformers; returns its float32 or `dtype` model for comparison."""
    of_text = f"{family}TextConfig"
    kind = getattr(transformers, of_text if hasattr(transformers, of_text) else f"{family}Config")
    config = kind(**{**TINY, **fields})
    refuse_old_oracle(config)
    torch.manual_seed(0)
    name = f"{family}ForCausalLM" if hasattr(transformers, f"{family}ForCausalLM") else f"{family}LMHeadModel"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or ".ln_" in name else 0.0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTION):
                buffer.normal_(0.0, 0.15)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def checkpoint_of(case: str, folder: pathlib.Path) -> transformers.PreTrainedModel:
    """Write the random checkpoint of a case; returns its model in float32."""
    family, fields = CASES[case]
    oracle = random_checkpoint(folder, family, **fields)
    own = OWN_NAMES.get(case.partition("-")[0])
    if own is not None:
        path = folder / "config.json"
        config = {key: value for key, value in json.loads(path.read_text()).items() if key not in GRANITE_MUP}
        path.write_text(json.dumps({**config, **own}))
    return oracle
