"""GGUF files of many architectures for tests, laid out as llama.cpp's converter does it (its folder `conversion`)."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
import torch
from gguf_files import add_value, quantised
from transformers import PreTrainedModel

from benchmarks.peers.models import interleave
from quire.compute.weights.names import separate_halves
from quire.config.experts import CORRECTION
from quire.config.model_fields import FULL

KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
"""Field of a config → key of every architecture."""
EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
SIZED = {**EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"}
HEAD = {"head_dim": "attention.key_length"}
LOCAL = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
SCALES = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
OWN_KEYS: dict[str, dict[str, str]] = {
    "llama": LOCAL,
    "qwen3moe": SIZED | HEAD,
    "qwen2moe": {**SIZED, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    "phi3": {},
    "gemma": HEAD,
    "olmo2": {},
    "smollm3": {},
    "olmoe": EXPERTS,
    "granite": SCALES,
    "granitemoe": SCALES | LOCAL,
    "glm4": HEAD,
    "glm4moe": {
        **HEAD, "n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count",
        "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
        "first_k_dense_replace": "leading_dense_block_count", "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
    },
    "gemma2": {**HEAD, "sliding_window": "attention.sliding_window", **{cap: cap for cap in CAPS}},
    "gemma3": {**HEAD, "sliding_window": "attention.sliding_window"},
}
INTERLEAVED = ("llama", "granite", "granitemoe", "smollm3")
"""Architectures whose files have rows of q and k in Meta's order."""

Piece = tuple[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""(name as in older checkpoints, a view into a parameter, what a file has of it, the inverse)."""


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def pieces(architecture: str, config: Any, state: dict[str, torch.Tensor]) -> Iterator[Piece]:
    """What a file has of each parameter of transformers' model."""
    for name, tensor in state.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for place, part in enumerate(("gate_proj", "up_proj")):
                half = tensor.shape[1] // 2
                view = tensor[:, place * half : place * half + half]
                yield name.replace("gate_up_proj", part) + ".weight", view, same, same
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor, same, same
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            yield name, tensor, lambda one: one + 1, lambda one: one - 1
        elif architecture in INTERLEAVED and heads is not None:
            yield name, tensor, functools.partial(interleave, n_heads=heads), functools.partial(apart, n_heads=heads)
        else:
            yield name, tensor, same, same


def apart(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    weight = weight.clone()
    separate_halves(weight, n_heads)
    return weight


def write_family(
    path: pathlib.Path,
    model: PreTrainedModel,
    architecture: str,
    dtype: Callable[[str], str] = lambda name: "F32",
    tokens: dict[str, Any] | None = None,
    apart: bool = False,
    **changes: Any,
) -> pathlib.Path:
    """Write a model of transformers, and give it the numbers that the file has.

    dtype: name in a file → type of a matrix. tokens: key after 'tokenizer.' → value. apart: a tensor for each expert.
    changes: key after the architecture's → another value, None for none, and '__' for '.'; a tensor's name → its
    numbers, None for none.
    """
    config, state = model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    values = {key: getattr(config, field) for field, key in {**KEYS, **OWN_KEYS[architecture]}.items()}
    values |= {"rope.freq_base": float(config.rope_parameters.get(FULL, config.rope_parameters)["rope_theta"])}
    if "attention.key_length" in values:
        values["attention.value_length"] = values["attention.key_length"]
    for key, value in (values | changes).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif value is not None:
            add_value(writer, f"{architecture}.{key}", value)
    for key, value in (tokens or {"ggml.tokens": [f"t{number}" for number in range(config.vocab_size)]}).items():
        add_value(writer, f"tokenizer.{key}", value)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for stored, view, encode, decode in pieces(architecture, config, state):
        stored = stored.replace("block_sparse_moe", "mlp").replace("mlp.router", "mlp.gate")  # GraniteMoE's
        stored = stored.replace(CORRECTION, "e_score_correction.bias")
        name = table.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert name is not None, stored
        if apart and "_exps" in name:
            parts = [(name.replace("_exps", f".{expert}"), one) for expert, one in enumerate(view)]
            for own, one in parts:
                one.copy_(add_tensor(writer, own, one, dtype(name)))
        elif name not in changes:
            view.copy_(decode(add_tensor(writer, name, encode(view.float()), dtype(name))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns the numbers that the file has; vectors and what chooses experts stay in float32, as the converter has
    them."""
    weight = tensor.contiguous().numpy()
    if weight.ndim == 1 or "ffn_gate_inp" in name or kind == "F32":
        writer.add_tensor(name, weight)
        return tensor
    dtype = gguf.GGMLQuantizationType[kind]
    blocks = quantised(weight.reshape(-1, weight.shape[-1]), kind)
    blocks = blocks.reshape(*weight.shape[:-1], -1)
    writer.add_tensor(name, blocks, raw_dtype=dtype)
    return torch.from_numpy(np.array(gguf.quants.dequantize(blocks, dtype)))
