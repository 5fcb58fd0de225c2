"""The weights of a GGUF file under the names of a checkpoint folder, for the loader.

Owns the match of names and which rows the converter permuted; does not own the file's layout (`config/gguf`), blocks
(`gguf_blocks`) or copies (`loader`).
"""

from __future__ import annotations

import pathlib
import re
from typing import Final

import torch

from quire.compute.weights.checkpoint import Shard
from quire.compute.weights.header import Entry
from quire.config.arch import ModelArch
from quire.config.gguf import read_header
from quire.config.gguf_model import ROPE_FREQS

MODEL_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK: Final = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")


def open_gguf(path: pathlib.Path) -> Shard:
    """The tensors of a GGUF file as one shard, named as in a checkpoint folder. Raises LoadError."""
    header = read_header(path)
    entries = [
        Entry(_checkpoint_name(tensor.name), tensor.dtype, tensor.shape, tensor.start, tensor.n_bytes)
        for tensor in header.tensors.values()
        if tensor.name != ROPE_FREQS  # part of the architecture, see `config/arch`
    ]
    return Shard(path, header.signature, tuple(entries))


def _checkpoint_name(name: str) -> str:
    """A name that is not known stays, and the loader refuses it."""
    match = _BLOCK.fullmatch(name)
    if match and match[2] in BLOCK_NAMES:
        return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{MODEL_NAMES[stem]}.{kind}" if stem in MODEL_NAMES else name


def interleaved_heads(arch: ModelArch, name: str) -> int:
    """In how many heads the rows of a weight are interleaved, 0 if they are not.

    Files of the architecture llama hold q and k with rows (0, d/2, 1, d/2 + 1, ...) of each head, for a rotary
    embedding that turns neighbours; Quire and the original checkpoints turn row i with row i + d/2.
    """
    if arch.family not in ("llama", "mistral"):
        return 0
    if ".self_attn.q_proj." in name:
        return arch.n_heads
    return arch.n_kv_heads if ".self_attn.k_proj." in name else 0


def separate_halves(weight: torch.Tensor, n_heads: int) -> None:
    """Undo the interleaving in place. weight: [n_heads * head_dim] or [n_heads * head_dim, k], contiguous."""
    pairs = weight.view(n_heads, -1, 2, *weight.shape[1:])
    weight.copy_(pairs.transpose(1, 2).reshape(weight.shape))
