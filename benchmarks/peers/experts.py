"""A GGUF file of a bundled shape with experts, in Q4_0, from random bytes: no checkpoint is rounded, since OLMoE in
bfloat16 and its copies would take 28 GB. The output head is Q6_K, as llama.cpp's own rounding leaves it. Needs `gguf`.

Invariant: values are spread like normal weights of deviation 0.02, so that routers choose as with `load_format dummy`.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Final

import gguf
import numpy as np

from quire.bench.shape import FOLDER

Q4, Q6 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q6_K
SPREAD: Final = 0.02
COMMON_KEYS: Final = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}
"""Field of config.json → key of every architecture."""
KEYS: Final = COMMON_KEYS | {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}


def write_experts(path: pathlib.Path, shape: str) -> None:
    """shape: a bundled one of the family OLMoE."""
    config = json.loads((FOLDER / shape / "config.json").read_text())
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path.with_suffix(".part"), "olmoe")
    for field, key in KEYS.items():
        writer.add_uint32(f"olmoe.{key}", config[field])
    writer.add_float32("olmoe.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32("olmoe.rope.freq_base", float(config["rope_theta"]))
    writer.add_uint32("general.file_type", 2)  # mostly Q4_0
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    writer.add_tensor("token_embd.weight", _q4(rng, vocab, hidden), raw_dtype=Q4)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output.weight", _q6(rng, vocab, hidden), raw_dtype=Q6)
    for layer in range(config["num_hidden_layers"]):
        _add_layer(writer, rng, config, f"blk.{layer}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)


def _add_layer(writer: gguf.GGUFWriter, rng: np.random.Generator, config: dict[str, Any], name: str) -> None:
    hidden, inner, n_experts = config["hidden_size"], config["intermediate_size"], config["num_experts"]
    for norm in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
        writer.add_tensor(f"{name}.{norm}.weight", np.ones(hidden, np.float32))
    for matrix in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"{name}.{matrix}.weight", _q4(rng, hidden, hidden), raw_dtype=Q4)
    router = rng.normal(0, SPREAD, (n_experts, hidden)).astype(np.float32)
    writer.add_tensor(f"{name}.ffn_gate_inp.weight", router)
    for matrix, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        writer.add_tensor(f"{name}.ffn_{matrix}_exps.weight", _q4(rng, n_experts, *shape), raw_dtype=Q4)


def _q4(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    """Blocks of 32: a float16 scale, then 16 bytes of two numbers each, 0 to 15 less 8."""
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(SPREAD / 4.6).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _q6(rng: np.random.Generator, n: int, k: int) -> np.ndarray[Any, Any]:
    """Blocks of 256: 192 bytes of numbers, 0 to 63 less 32, 16 scales of one byte, then a float16 scale of these."""
    blocks = rng.integers(0, 256, (n, k // 256, 210), np.uint8)
    blocks[..., 192:208] = 32
    blocks[..., 208:] = np.frombuffer(np.float16(SPREAD / 18.5 / 32).tobytes(), np.uint8)
    return blocks.reshape(n, -1)
