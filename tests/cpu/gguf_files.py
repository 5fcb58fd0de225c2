"""GGUF files for tests, written with the package gguf from a small random checkpoint of transformers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks.peers.models import gguf_name, interleave

UNWRITTEN = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Types that the package cannot quantise to → bytes where the float16 numbers of a block begin."""


def quantised(weight: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Bytes of a matrix; random small blocks for the types that the package cannot quantise to."""
    kind = gguf.GGMLQuantizationType[dtype]
    if dtype not in UNWRITTEN:
        return gguf.quants.quantize(weight, kind)
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(weight.size)
    blocks = random.integers(0, 256, (weight.size // block_len, block_bytes), dtype=np.uint8)
    for start in UNWRITTEN[dtype]:
        blocks[:, start : start + 2] = np.array(2e-4, np.float16).reshape(1, 1).view(np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def write_gguf(
    path: pathlib.Path,
    model: Any,
    architecture: str,
    dtype: str | Callable[[str], str] = "F32",
    tokens: dict[str, Any] | None = None,
    **keys: float | str | bool,
) -> pathlib.Path:
    """Write a transformers model. dtype: of the matrices, or a function of the tensor's name in the
    file. tokens: key after 'tokenizer.' → value. keys: further ones of the architecture."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_string("general.name", "test")
    for key, value in keys.items():
        add_value(writer, f"{architecture}.{key.replace('__', '.')}", value)
    for key, value in (tokens or {"ggml.tokens": [f"t{i}" for i in range(config.vocab_size)]}).items():
        add_value(writer, f"tokenizer.{key}", value)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = parameter.float()
        for part, n_heads in (("q_proj.", config.num_attention_heads), ("k_proj.", config.num_key_value_heads)):
            if architecture == "llama" and part in name:
                weight = interleave(weight, n_heads)
        weight = weight.numpy()
        kind = dtype if isinstance(dtype, str) else dtype(gguf_name(name))
        if weight.ndim != 2 or kind == "F32":
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight, dtype=np.float32))
        else:
            writer.add_tensor(gguf_name(name), quantised(weight, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config.rope_parameters, head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """The tensor of Llama 3 files, by the formula of llama.cpp's converter."""
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for wavelength in (2 * torch.pi / frequencies).tolist():
        smooth = (context / wavelength - low) / (high - low)
        blend = 1 / ((1 - smooth) / rope["factor"] + smooth) if smooth else rope["factor"]
        factors.append(1.0 if wavelength < context / high else rope["factor"] if wavelength > context / low else blend)
    return np.array(factors, dtype=np.float32)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
