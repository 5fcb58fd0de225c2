"""Reading a model's config.json: the keys that most families share, each with its limits and transformers' default.

Owns what such a key means. Does not own which keys a family has (`families`).
Invariant: whatever the values are, the answer is inside the stated limits or a ConfigError that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from quire.config.arch import DTYPES, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelArch
from quire.config.attention import AttentionSpec
from quire.config.feed_forward import FeedForwardSpec
from quire.config.fields import Fields, Watched, is_integer
from quire.config.layers import Activation, LayerSpec, NormKind, NormSpec
from quire.config.rope import MAX_POSITIONS, Rope, parse_rope
from quire.core.errors import ConfigError

MAX_EOS: Final = 256
MAX_SCALE: Final = 1e6
MTP_MODULES: Final = "num_nextn_predict_layers"
MAX_MTP_MODULES: Final = 64
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS: Final = {
    "silu": Activation.SILU, "swish": Activation.SILU, "gelu": Activation.GELU, "relu": Activation.RELU,
    "gelu_new": Activation.GELU_TANH, "gelu_pytorch_tanh": Activation.GELU_TANH, "gelu_fast": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
}  # fmt: skip
"""hidden_act → activation."""


class ModelFields(Fields):
    """One config.json. `family` is put into what it describes."""

    def __init__(self, values: Watched, where: str, family: str, aliases: Mapping[str, str] | None = None) -> None:
        super().__init__(values, where, aliases)
        self.values: Watched = values
        self.family = family

    def with_values(self, **values: Any) -> ModelFields:
        """The same config.json with other values."""
        return ModelFields(self.values.with_values(**values), self.where, self.family, self._aliases)

    def is_null(self, name: str) -> bool:
        """Whether the key is there and null, which some families tell from its absence."""
        return self._aliases.get(name, name) in self.values and name not in self

    @property
    def hidden_size(self) -> int:
        return self.integer("hidden_size", 1, MAX_WIDTH)

    @property
    def n_layers(self) -> int:
        return self.integer("num_hidden_layers", 1, MAX_LAYERS)

    @property
    def max_position(self) -> int:
        return self.integer("max_position_embeddings", 1, MAX_POSITIONS)

    def rope(self, **defaults: Any) -> Rope:
        """The rotary embedding that config.json asks for; defaults: see `parse_rope`."""
        return parse_rope(self, self.max_position, **defaults)

    def scale(self, name: str, default: float = 1.0) -> float:
        """A factor above 0."""
        return self.number(name, 1e-6, MAX_SCALE, default)

    def optional(self, name: str, default: float = 0.0) -> float:
        """A number that null, or 0, switches off: 0 then; `default` where the key is absent."""
        return 0.0 if self.is_null(name) else self.number(name, 0.0, MAX_SCALE, default)

    def only(self, name: str, value: bool | float | str) -> None:
        """ConfigError unless `name` is absent or has the one value that is supported."""
        if name in self and self.values[name] != value:
            raise self.error(name, f"{str(value).lower()}: nothing else is built")

    def rms(self, key: str = "rms_norm_eps", default: float = 1e-6, **more: Any) -> NormSpec:
        """An RMS norm with the epsilon under `key`."""
        return NormSpec(eps=self.number(key, 1e-12, 0.1, default), **more)

    def layer_norm(self, key: str, default: float = 1e-5, *, bias: bool = True, **more: Any) -> NormSpec:
        """A LayerNorm with the epsilon under `key`."""
        eps = self.number(key, 1e-12, 0.1, default)
        return NormSpec(kind=NormKind.LAYER, eps=eps, bias=bias, **more)

    def attention(
        self,
        *,
        grouped: bool = True,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        **more: Any,
    ) -> AttentionSpec:
        """Attention. grouped: whether the family reads num_key_value_heads; else there are n_kv_heads. n_kv_heads,
        head_dim: defaults; None: as many as query heads (as null in config.json), and hidden_size / n_heads. scale:
        None: head_dim ** -0.5. more: fields of `AttentionSpec`."""
        n_heads = self.integer("num_attention_heads", 1, MAX_HEADS)
        is_null = grouped and self.is_null("num_key_value_heads")
        default = n_heads if n_kv_heads is None or is_null else n_kv_heads
        n_kv_heads = self.integer("num_key_value_heads", 1, MAX_HEADS, default) if grouped else default
        if n_heads % n_kv_heads:
            raise self.error("num_key_value_heads", f"a divisor of num_attention_heads = {n_heads}")
        hidden_size = self.hidden_size
        if "head_dim" not in self and head_dim is None and hidden_size % n_heads:
            raise self.error(
                "num_attention_heads", f"a divisor of hidden_size = {hidden_size}, as head_dim is not given"
            )
        head_dim = self.integer("head_dim", 2, MAX_HEAD_DIM, head_dim or hidden_size // n_heads)
        if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
            raise ConfigError(
                f"{self.where}: head_dim = {head_dim} must be an even number from 2 to {MAX_HEAD_DIM}", param="head_dim"
            )
        rope = more.get("rope")
        if rope is not None:
            _check_rotary(self, rope, head_dim)
        return AttentionSpec(
            n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
            scale=float(head_dim**-0.5) if scale is None else scale, **more,
        )  # fmt: skip

    def feed_forward(
        self, *, act: str = "hidden_act", default: str = "silu", size: int | None = None, **more: Any
    ) -> FeedForwardSpec:
        """A feed-forward with the activation under `act`. default: of that; size: default of intermediate_size, None
        for none; more: fields of `FeedForwardSpec`."""
        activation = ACTIVATIONS[self.choice(act, tuple(ACTIVATIONS), default)]
        size = self.integer("intermediate_size", 1, MAX_WIDTH, size)
        return FeedForwardSpec(size=size, activation=activation, **more)

    def layer_types(self, default: Iterable[str] = ()) -> list[str]:
        """`FULL` or `SLIDING` for each layer; the default where there are none."""
        types = self.values.get("layer_types")
        if types is None:
            return list(default)
        n_layers, known = self.n_layers, (FULL, SLIDING)
        if not isinstance(types, list) or len(types) != n_layers or not all(kind in known for kind in types):
            raise self.error("layer_types", f"num_hidden_layers = {n_layers} entries, each {' or '.join(known)}")
        return types

    def window(self, default: int = 4096) -> int:
        """sliding_window, of layers that have one: null is an error."""
        if self.is_null("sliding_window"):
            raise self.error("sliding_window", "a number of tokens, as there are layers with a window")
        return self.integer("sliding_window", 1, 2**31, default)

    def model(
        self, layers: Sequence[LayerSpec], norm: NormSpec, *, tied: bool = False, max_position: int = 0, **more: Any
    ) -> ModelArch:
        """The description. tied: default of tie_word_embeddings. max_position: where its key has another name. more:
        fields of `ModelArch`."""
        vocab_size = self.integer("vocab_size", 1, MAX_VOCAB)
        max_position = max_position or self.max_position
        rope = next((layer.mixer.rope for layer in layers if layer.mixer.rope is not None), None)
        return ModelArch(
            family=self.family,
            layers=tuple(layers),
            hidden_size=self.hidden_size,
            vocab_size=vocab_size,
            norm=norm,
            tie_embeddings=self.flag("tie_word_embeddings", tied),
            max_position=_stated_context(rope, max_position),
            max_position_scaled=_scaled_context(rope, max_position),
            dtype=_dtype(self),
            eos_token_ids=token_ids(self, "eos_token_id", vocab_size),
            bos_token_id=next(iter(token_ids(self, "bos_token_id", vocab_size)), None),
            n_mtp_modules=self.integer(MTP_MODULES, 0, MAX_MTP_MODULES, 0),
            **more,
        )


def token_ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """Ids under `name`: an integer, a list, or absent (none). Raises ConfigError unless all are below vocab_size."""
    value = fields.values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_EOS or not all(is_integer(i) and 0 <= i < vocab_size for i in ids):
        one = f"a token id below vocab_size = {vocab_size:,}"
        raise fields.error(name, f"{one}, or a list of at most {MAX_EOS} of them")
    return tuple(ids)


def _check_rotary(fields: Fields, rope: Rope, head_dim: int) -> None:
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim % 2 or not rotary_dim:
        raise ConfigError(
            f"{fields.where}: partial_rotary_factor = {rope.partial:g} rotates {rotary_dim} of head_dim = {head_dim}"
            " dimensions: it must be an even number of at least 2",
            param="partial_rotary_factor",
        )
    for name, divisors in (("short_factor", rope.divisors), ("long_factor", rope.long_divisors)):
        if divisors and len(divisors) != rotary_dim // 2:
            raise ConfigError(
                f"{fields.where}: {name} has {len(divisors)} numbers; it must have {rotary_dim // 2}, half of the"
                f" {rotary_dim} dimensions that are rotated",
                param=name,
            )


def _stated_context(rope: Rope | None, max_position: int) -> int:
    """YaRN checkpoints state the original context or the extended one; both mean factor x original."""
    if rope is not None and rope.type == "yarn":
        return min(MAX_POSITIONS, max(max_position, int(rope.original_max_position * rope.factor)))
    return max_position


def _scaled_context(rope: Rope | None, max_position: int) -> int:
    """Linear and dynamic scaling: some checkpoints count the factor in max_position_embeddings and some do not."""
    if rope is not None and rope.type in ("linear", "dynamic"):
        return min(MAX_POSITIONS, int(max_position * rope.factor))
    return _stated_context(rope, max_position)


def _dtype(fields: Fields) -> str:
    """transformers 5 writes `dtype`, older ones `torch_dtype`; none means float32."""
    name = "dtype" if "dtype" in fields else "torch_dtype"
    return fields.choice(name, DTYPES, "float32")
