"""The weights of a GGUF file under the names of a checkpoint folder, for the loader.

Owns the match of names; does not own the file's layout (`config/gguf`), the order of rows (`names`), blocks
(`gguf_blocks`) or copies (`loader`).
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Final

from quire.compute.weights.checkpoint import Shard
from quire.compute.weights.header import Entry
from quire.config.experts import CORRECTION
from quire.config.gguf import read_header
from quire.config.gguf_model import ROPE_TENSORS, layout_of

MODEL_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "attention_post_norm",
    "post_ffw_norm": "ffn_post_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
OF_NO_KIND: Final = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": f"mlp.gate.{CORRECTION}"}
"""Tensors of a block that have no such kind in a folder."""
ONE_ROW: Final = ".mlp.shared_expert_gate.weight"
"""End of the name of a matrix of one row, which older files have as a vector."""
_BLOCK: Final = re.compile(r"blk\.(0|[1-9]\d{0,5})\.((?:nextn\.)?\w+)\.(weight|bias)")

_EXPERT: Final = re.compile(r"blk\.(0|[1-9]\d{0,5})\.ffn_(gate|up|down)\.(0|[1-9]\d{0,5})\.weight")
"""A matrix of one expert, as the first files of Mixtral have it."""


def open_gguf(path: pathlib.Path) -> Shard:
    """The tensors of a GGUF file as one shard, named as in a checkpoint folder. Raises LoadError."""
    header = read_header(path)
    names = {**BLOCK_NAMES, **layout_of(header)[1].names}
    entries = []
    for tensor in header.tensors.values():
        if tensor.name in ROPE_TENSORS:  # part of the architecture, see `config/model`
            continue
        name, shape = _checkpoint_name(tensor.name, names), tensor.shape
        if name.endswith(ONE_ROW) and len(shape) == 1:
            shape = (1, *shape)
        entries.append(Entry(name, tensor.dtype, shape, tensor.start, tensor.n_bytes))
    return Shard(path, header.signature, tuple(entries))


def _checkpoint_name(name: str, names: Mapping[str, str]) -> str:
    """names: of a block's tensors. A name that is not known stays, and the loader refuses it."""
    match = _EXPERT.fullmatch(name)
    if match:
        return f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
    match = _BLOCK.fullmatch(name)
    if match and f"{match[2]}.{match[3]}" in OF_NO_KIND:
        return f"model.layers.{match[1]}.{OF_NO_KIND[f'{match[2]}.{match[3]}']}"
    if match and match[2] in names:
        return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{MODEL_NAMES[stem]}.{kind}" if stem in MODEL_NAMES else name
