"""The same model for every side: a bf16 safetensors checkpoint and GGUF files of it (needs the package `gguf`).

Shapes get seeded random weights (normal, 0.02; norms around 1) and no vocabulary: benchmarks use token ids.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch

from benchmarks.peers.experts import COMMON_KEYS, write_experts
from quire.bench.shape import FOLDER
from quire.compute.models.decoder import decoder_on
from quire.compute.weights.dummy import fill_random
from quire.config.model import read_arch

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KEYS = COMMON_KEYS | {"head_dim": "rope.dimension_count"}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
Add = Callable[[gguf.GGUFWriter, str, torch.Tensor], None]
"""(file, name in it, weight)."""


def random_checkpoint(folder: pathlib.Path, shape: str, n_layers: int = 0) -> None:
    """Write config.json and model.safetensors of a bundled shape, with fewer layers if given."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((FOLDER / shape / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({"num_hidden_layers": n_layers} if n_layers else {})))
    weights = dict(decoder_on(torch.device("cpu"), read_arch(folder), torch.bfloat16, 1).weights())
    fill_random(weights.items(), 0, torch.device("cpu"))
    part = folder / "model.safetensors.part"
    safetensors.torch.save_file({name: one.contiguous() for name, one in weights.items()}, part)
    part.rename(folder / "model.safetensors")


def write_gguf(folder: pathlib.Path, path: pathlib.Path, add: Add | None = None, file_type: str = "BF16") -> None:
    """The checkpoint in `folder` as a GGUF file, with its tokenizer if any. add: puts a weight into it;
    None: matrices in BF16 bit for bit, vectors in F32. file_type: of most matrices, as llama.cpp says it."""
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path.with_suffix(".part"), architecture)
    for field, key in KEYS.items():
        writer.add_uint32(f"{architecture}.{key}", config[field])
    for key in ("key_length", "value_length"):
        writer.add_uint32(f"{architecture}.attention.{key}", config["head_dim"])
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{architecture}.rope.freq_base", float(config["rope_theta"]))
    writer.add_uint32("general.file_type", gguf.LlamaFileType[f"MOSTLY_{file_type}"])
    add_tokenizer(writer, folder / "tokenizer.json", config.get("eos_token_id"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in safetensors.torch.load_file(folder / "model.safetensors").items():
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            weight = interleave(weight, heads[projection])
        (add or add_weight)(writer, gguf_name(name), weight)
    if config["rope_scaling"]:
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)


def add_weight(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    if weight.ndim == 1:
        writer.add_tensor(name, weight.float().numpy())
    else:
        bits = weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_tokenizer(writer: gguf.GGUFWriter, path: pathlib.Path, end_id: int | None = None) -> None:
    """A byte-level BPE tokenizer.json, or the note that there is none. end_id: of the token that ends replies."""
    if not path.exists():
        writer.add_string("tokenizer.ggml.model", "no_vocab")
        return
    tokenizer = json.loads(path.read_text())
    added = {one["content"]: CONTROL if one["special"] else USER_DEFINED for one in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"] | {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [added.get(token, NORMAL) for token in tokens])
    writer.add_array("tokenizer.ggml.merges", merges)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    if end_id is not None:
        writer.add_uint32("tokenizer.ggml.eos_token_id", end_id)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a weight of a Hugging Face checkpoint."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def interleave(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of q or k in the order of Meta's rotary embedding, which files of the architecture `llama` have."""
    return weight.view(n_heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def rope_factors(config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The tensor of Llama 3 files: what each frequency is divided by (`convert_hf_to_gguf.py` of llama.cpp)."""
    rope, head_dim = config["rope_scaling"], config["head_dim"]
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def has_experts(model: str) -> bool:
    """Whether a bundled shape has some: their file is made without a checkpoint (`experts.py`)."""
    path = FOLDER / model / "config.json"
    return path.exists() and "num_experts" in json.loads(path.read_text())


def checkpoint(folder: pathlib.Path, model: str, demo: pathlib.Path) -> pathlib.Path:
    """The checkpoint of a shape or of `demo`, in a folder with its files; written if it is not there. A shape with
    experts has a file in Q4_0 alone."""
    target = folder / model
    if has_experts(model):
        target.mkdir(parents=True, exist_ok=True)
        if not (target / "Q4_0.gguf").exists():
            write_experts(target / "Q4_0.gguf", model)
        return target
    if not (target / "model.safetensors").exists():
        if model == "demo":
            shutil.copytree(demo, target, dirs_exist_ok=True)
        else:
            random_checkpoint(target, model)
    if not (target / "BF16.gguf").exists():
        write_gguf(target, target / "BF16.gguf")
    return target
