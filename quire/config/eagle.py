"""The config.json of an EAGLE-3 head: a decoder layer that guesses for a model from the states of three of its layers.

Owns its keys, and what of a model a head must fit (Li et al. 2025, "EAGLE-3", arXiv 2503.01840; the layout is that of
published heads). Does not own its tensors (`compute/draft/head.py`).
Invariant: a `HeadArch` is one that can be computed; everything else was a ConfigError.
"""

from __future__ import annotations

import pathlib
from typing import Any, Final

import msgspec

from quire.config.arch import MAX_LAYERS, ModelArch
from quire.config.fields import Fields, read_object
from quire.config.layers import LayerSpec
from quire.config.model import parse_arch
from quire.core.errors import ConfigError, shown

TAPS: Final = "eagle_aux_hidden_state_layer_ids"
N_TAPS: Final = 3
KNOWN: Final = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "norm_before_residual": False, "norm_before_fc": False,
}  # fmt: skip
"""Keys that say what a head is made of → the only value that is built."""
LEFT_OUT: Final = (
    "architectures", "auto_map", "eagle_config", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
)  # fmt: skip
"""What says nothing of the layer: its kind is that of model_type."""


class HeadArch(msgspec.Struct, frozen=True, kw_only=True):
    """A head."""

    arch: ModelArch
    """Its layer, norm and small vocabulary, as a model of one layer."""
    vocab_size: int
    """Token ids of the model that it guesses for."""
    taps: tuple[int, ...]
    """Layers of the model whose inputs it reads, the lowest first; empty: those of `taps_of`."""

    def taps_of(self, n_layers: int) -> tuple[int, ...]:
        """The layers of a model of n_layers; where the head does not say, those that all published heads were trained
        with."""
        return self.taps or (2, n_layers // 2, n_layers - 3)

    def check(self, folder: pathlib.Path, model: ModelArch) -> None:
        """ConfigError unless it can guess for this model."""
        what, param = f"the head {folder}", "speculative_config"
        if self.arch.hidden_size != model.hidden_size:
            raise ConfigError(
                f"{what} reads states of {self.arch.hidden_size} numbers and those of the model have "
                f"{model.hidden_size}: give a head that was trained for this model",
                param=param,
            )
        if self.vocab_size != model.vocab_size:
            raise ConfigError(
                f"{what} guesses for {self.vocab_size} token ids and the model has {model.vocab_size}: give a head "
                "that was trained for this model",
                param=param,
            )
        taps = self.taps_of(model.n_layers)
        if sorted(set(taps)) != list(taps) or taps[0] < 0 or taps[-1] >= model.n_layers:
            raise ConfigError(
                f"{what} reads the states before layers {', '.join(map(str, taps))} and the model has "
                f"{model.n_layers}, from 0: give a head that was trained for this model, or add {TAPS}, three rising "
                "numbers, to its config.json",
                param=param,
            )


def read_head(folder: pathlib.Path) -> HeadArch:
    """The head in `folder`/config.json. Raises ConfigError naming the field, its value and what is allowed."""
    return parse_head(read_object(folder / "config.json"), f"{folder}/config.json")


def parse_head(config: dict[str, Any], where: str = "config.json") -> HeadArch:
    """`HeadArch` from a decoded config.json; `where` names it in errors."""
    fields = Fields(config, where)
    if "draft_vocab_size" not in fields:
        raise fields.error("draft_vocab_size", "a number of tokens: this is no EAGLE-3 head, see docs/speculation.md")
    vocab_size = fields.integer("vocab_size", 1, 1 << 22)
    draft_vocab_size = fields.integer("draft_vocab_size", 1, vocab_size)
    hidden_size = fields.integer("hidden_size", 2, 1 << 20)
    if fields.integer("target_hidden_size", 2, 1 << 20, hidden_size) != hidden_size:
        raise fields.error("target_hidden_size", f"hidden_size = {hidden_size}: a head as wide as its model")
    fields.integer("num_hidden_layers", 1, 1)
    own = fields.nested("eagle_config")
    for part in (fields, own):
        for name, value in KNOWN.items():
            if part.flag(name, value) != value:
                raise part.error(name, f"{shown(value)}, as nothing else is built")
    plain = {name: value for name, value in config.items() if name not in (*LEFT_OUT, TAPS, *KNOWN)}
    arch = parse_arch(plain | {"vocab_size": draft_vocab_size, "tie_word_embeddings": False}, where)
    _check_layer(arch.layers[0], fields)
    return HeadArch(arch=arch, vocab_size=vocab_size, taps=_taps(own if TAPS in own else fields))


def _check_layer(layer: LayerSpec, fields: Fields) -> None:
    """ConfigError unless it is that of all known heads: RMS norms, rotated attention and SwiGLU, without bias."""
    mixer = layer.mixer
    has_more = mixer.qkv_bias or mixer.o_bias or layer.ffn.bias or mixer.qk_norm or mixer.window or mixer.soft_cap
    if not layer.is_plain or has_more or mixer.rope is None:
        raise fields.error("model_type", "that of a head without bias, windows or norms of queries and keys")


def _taps(fields: Fields) -> tuple[int, ...]:
    """As the head says it; empty where it does not."""
    found = fields.values.get(TAPS)
    if found is None:
        return ()
    is_list = isinstance(found, list) and len(found) == N_TAPS and all(type(one) is int for one in found)
    if not is_list or sorted(set(found)) != found or not 0 <= found[0] <= found[-1] < MAX_LAYERS:
        raise fields.error(TAPS, f"{N_TAPS} numbers of layers, rising, from 0")
    return tuple(found)
