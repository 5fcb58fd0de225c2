"""The config.json of an EAGLE-3 head: a decoder layer that guesses for a model from the states of three of its layers.

Owns its keys (Li et al. 2025, "EAGLE-3", arXiv 2503.01840; they are those of published heads). Does not own its tensors
(`heads`).
"""

from __future__ import annotations

import pathlib
from typing import Any, Final

from quire.config.arch import MAX_LAYERS
from quire.config.attention import AttentionSpec
from quire.config.feed_forward import FeedForwardSpec
from quire.config.fields import Fields, read_object
from quire.config.heads import EAGLE3, N_TAPS, TAPS, HeadArch
from quire.config.layers import LayerSpec
from quire.config.model import parse_arch
from quire.core.errors import ConfigError, shown

KNOWN: Final = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "norm_before_residual": False, "norm_before_fc": False,
}  # fmt: skip
"""Keys that say what a head is made of → the only value that is built."""
LEFT_OUT: Final = (
    "architectures", "auto_map", "eagle_config", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
)  # fmt: skip
"""What says nothing of the layer: its kind is that of model_type."""


def refuse_head(folder: pathlib.Path, name: str) -> None:
    """ConfigError where `folder`, which is to be a model and is called `name`, is a head."""
    path = folder / "config.json"
    if path.is_file() and "draft_vocab_size" in read_object(path):
        raise ConfigError(f'{name} is an EAGLE-3 head: use "method": "eagle3"', param="speculative_config")


def read_head(folder: pathlib.Path) -> HeadArch:
    """The head in `folder`/config.json. Raises ConfigError naming the field, its value and what is allowed."""
    return parse_head(read_object(folder / "config.json"), f"{folder}/config.json")


def parse_head(config: dict[str, Any], where: str = "config.json") -> HeadArch:
    """`HeadArch` from a decoded config.json; `where` names it in errors."""
    fields = Fields(config, where)
    if "draft_vocab_size" not in fields:
        raise fields.error("draft_vocab_size", "a number of tokens: this is no EAGLE-3 head, see docs/heads.md")
    vocab_size = fields.integer("vocab_size", 1, 1 << 22)
    draft_vocab_size = fields.integer("draft_vocab_size", 1, vocab_size, bound="vocab_size")
    hidden_size = fields.integer("hidden_size", 2, 1 << 20)
    if fields.integer("target_hidden_size", 2, 1 << 20, hidden_size) != hidden_size:
        raise fields.error("target_hidden_size", f"hidden_size = {hidden_size}: a head as wide as its model")
    fields.integer("num_hidden_layers", 1, 1)
    if "quantization_config" in fields:
        raise fields.error("quantization_config", "absent: heads are read in floating numbers only")
    own = fields.nested("eagle_config")
    for part in (fields, own):
        for name, value in KNOWN.items():
            if part.flag(name, value) != value:
                raise part.error(name, f"{shown(value)}, as nothing else is built")
    plain = {name: value for name, value in config.items() if name not in (*LEFT_OUT, TAPS, *KNOWN)}
    arch = parse_arch(plain | {"vocab_size": draft_vocab_size, "tie_word_embeddings": False}, where)
    _check_layer(arch.layers[0], fields)
    return HeadArch(layout=EAGLE3, arch=arch, vocab_size=vocab_size, taps=_taps(fields, own))


def _check_layer(layer: LayerSpec, fields: Fields) -> None:
    """ConfigError unless it is that of all known heads: RMS norms, rotated attention and SwiGLU, without bias."""
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec) or not isinstance(layer.ffn, FeedForwardSpec):
        raise fields.error("model_type", "that of a head with grouped-query attention and SwiGLU")
    has_more = mixer.qkv_bias or mixer.o_bias or layer.ffn.bias or mixer.qk_norm or mixer.window or mixer.soft_cap
    if not layer.is_plain or not layer.ffn.is_plain or has_more or mixer.rope is None:
        raise fields.error("model_type", "that of a head without bias, windows or norms of queries and keys")


def _taps(fields: Fields, own: Fields) -> tuple[int, ...]:
    """The layers whose inputs the head reads; empty where it does not say.

    vLLM reads the key at the top, as layers whose inputs are meant. Heads trained by SpecForge and ModelOpt have it in
    eagle_config, which SGLang reads, as layers whose outputs are meant: the inputs of those behind them.
    """
    inputs, outputs = _layers(fields), _layers(own)
    behind = tuple(layer + 1 for layer in outputs)
    if inputs and behind and inputs != behind:
        raise fields.error(
            TAPS,
            f"{list(behind)} beside eagle_config: {list(outputs)}, whose layers are those that leave the states and not"
            " those that read them; keep the one that the head was trained with",
        )
    return inputs or behind


def _layers(fields: Fields) -> tuple[int, ...]:
    """Under the key, as they stand there."""
    found = fields.values.get(TAPS)
    if found is None:
        return ()
    is_list = isinstance(found, list) and len(found) == N_TAPS and all(type(one) is int for one in found)
    if not is_list or sorted(set(found)) != found or not 0 <= found[0] <= found[-1] < MAX_LAYERS:
        raise fields.error(TAPS, f"{N_TAPS} numbers of layers, rising, from 0")
    return tuple(found)
