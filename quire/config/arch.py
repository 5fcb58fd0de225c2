"""`ModelArch`: a decoder as data. Every part that depends on a model's shape derives from it. Torch-free.

Owns the description and what is read off it. Does not own how a config.json says it (`families`), its parameters
(`parameters`), memory (`planner`) nor data flow (`compute/models`).
Invariant: a `ModelArch` describes a model that `compute/models` can build; everything else was a ConfigError.
"""

from __future__ import annotations

from typing import Final

import msgspec

from quire.config.codings import Codings
from quire.config.layers import KVSpec, LayerSpec, NormSpec
from quire.config.parameters import n_parameters
from quire.config.rope import Rope
from quire.config.states import StateSpec

MAX_VOCAB: Final = 2**22
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 512
MAX_WIDTH: Final = 2**20
"""Limit of hidden_size and ffn_size."""
DTYPES: Final = ("bfloat16", "float16", "float32")


class ModelArch(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder: token embedding, layers, final norm, head. All layers that keep keys have heads of one shape."""

    family: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    """Rows of the embedding and width of the logits (a tokenizer may know fewer ids)."""
    norm: NormSpec
    """Before the head."""
    tie_embeddings: bool
    """The head is the embedding table."""
    head_bias: bool = False
    embedding_scale: float = 1.0
    """Factor on the embeddings, rounded to the model's dtype."""
    float32_stream: bool = False
    """The residual stream is float32, whatever dtype the parameters have."""
    n_positions: int = 0
    """Rows of a table of learned positions; 0: there is none."""
    first_position: int = 0
    """Its row of position 0."""
    logits_scale: float = 1.0
    logits_soft_cap: float = 0.0
    """c > 0: logits become c * tanh(logit / c)."""
    max_position: int
    """Context in tokens that the checkpoint states; the default of max_model_len."""
    max_position_scaled: int
    """Largest max_model_len that its rope scaling covers; at least max_position."""
    dtype: str
    """Of the checkpoint: 'bfloat16', 'float16' or 'float32'."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    n_mtp_modules: int = 0
    """Heads that the checkpoint has for itself (`config/mtp`): no part of the model."""
    codings: Codings | None = None
    """How the checkpoint stores quantised matrices; None: it has none."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def kv_specs(self) -> dict[int, KVSpec]:
        """Layer → what it keeps of every token; without the layers that keep nothing."""
        specs = {layer: spec.mixer.kv_spec for layer, spec in enumerate(self.layers)}
        return {layer: spec for layer, spec in specs.items() if spec is not None}

    @property
    def state_specs(self) -> dict[int, StateSpec]:
        """Layer → what it keeps of every sequence; without the layers that keep nothing."""
        specs = {layer: spec.mixer.state_spec for layer, spec in enumerate(self.layers)}
        return {layer: spec for layer, spec in specs.items() if spec is not None}

    @property
    def keeps_lines(self) -> bool:
        """Whether a token leaves one line that is key and value at once (`KVSpec.value_in_key`)."""
        return any(spec.value_in_key for spec in self.kv_specs.values())

    @property
    def n_heads(self) -> int:
        """Query heads of every layer that keeps keys; 1 where none does."""
        return next((self.layers[layer].mixer.n_heads for layer in self.kv_specs), 1)

    @property
    def n_kv_heads(self) -> int:
        """Key heads of every layer that keeps keys; 1 where none does."""
        return next((spec.n_kv_heads for spec in self.kv_specs.values()), 1)

    @property
    def head_dim(self) -> int:
        """Width of a key in every layer that keeps keys; 1 where none does."""
        return next((spec.head_dim for spec in self.kv_specs.values()), 1)

    @property
    def ffn_size(self) -> int:
        """Width of the widest feed-forward."""
        return max(layer.ffn.size for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each layer that keeps keys, see `KVSpec.window`."""
        return tuple(spec.window for spec in self.kv_specs.values())

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings, in the order of the first layer that has each."""
        return tuple(dict.fromkeys(layer.mixer.rope for layer in self.layers if layer.mixer.rope is not None))

    @property
    def n_parameters(self) -> int:
        """Weights, a tied head counted once."""
        return n_parameters(self)
