"""`ModelArch`: the numbers and features of a model, read from config.json or GGUF metadata and checked. Torch-free.

Owns which architectures and values are accepted; does not own weights, memory or what a machine can hold.
Invariant: a `ModelArch` describes a model that `compute/models` can build; everything else was a ConfigError
naming field, value and limit. Code shipped with a checkpoint is never imported: its mention is an error.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from quire.config.advice import no_model, not_supported, quantised_with
from quire.config.fields import Fields, is_integer, read_object
from quire.config.gguf import Header, is_gguf, read_header
from quire.config.gguf_model import config_of, key_of, rope_divisors
from quire.config.rope import DIVIDED, MAX_POSITIONS, Rope, parse_rope
from quire.core.errors import ConfigError, LoadError, shown

MAX_VOCAB: Final = 2**22
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 512
MAX_WIDTH: Final = 2**20
"""Limit of hidden_size and ffn_size."""
MAX_NESTING: Final = 64
MAX_EOS: Final = 256
DTYPES: Final = ("bfloat16", "float16", "float32")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a config.json of an architecture means where it says nothing, and which of its fields count."""

    name: str
    model_type: str
    qkv_bias: bool = False
    """Bias on q, k, v whatever the config says."""
    reads_attention_bias: bool = False
    """`attention_bias` puts a bias on q, k, v and o."""
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    n_kv_heads: int | None = None
    """Default of num_key_value_heads; None: as many as query heads."""
    head_dim: int | None = None
    """Default of head_dim; None: hidden_size / n_heads."""
    window: str = "none"
    """'none'; 'uniform': sliding_window holds in every layer; 'layered': use_sliding_window and layer_types."""


FAMILIES: Final = {
    "LlamaForCausalLM": Family(name="llama", model_type="llama", reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(name="mistral", model_type="mistral", n_kv_heads=8, window="uniform"),
    "Qwen2ForCausalLM": Family(name="qwen2", model_type="qwen2", qkv_bias=True, window="layered"),
    "Qwen3ForCausalLM": Family(
        name="qwen3", model_type="qwen3", reads_attention_bias=True, qk_norm=True, head_dim=128, window="layered"
    ),
}
"""Architecture name in config.json → family. The defaults are those of transformers."""


class ModelArch(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder: token embedding, `n_layers` of attention and SwiGLU with pre-norm, final norm, head."""

    family: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    """Divides n_heads; head h of q reads head h // (n_heads / n_kv_heads) of k and v."""
    head_dim: int
    """Even; need not be hidden_size / n_heads."""
    ffn_size: int
    vocab_size: int
    """Rows of the embedding and width of the logits (a tokenizer may know fewer ids)."""
    tie_embeddings: bool
    """The head is the embedding table."""
    max_position: int
    """Context in tokens that the checkpoint states; the default of max_model_len."""
    max_position_scaled: int
    """Largest max_model_len that its rope scaling covers; at least max_position."""
    rms_eps: float
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over head_dim of q and k, before the rotary embedding."""
    windows: tuple[int, ...]
    """One a layer: w > 0 sees the last w tokens, itself included; 0 sees all."""
    dtype: str
    """Of the checkpoint: 'bfloat16', 'float16' or 'float32'."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_size(self) -> int:
        """Columns of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads (or value heads)."""
        return self.n_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on q·k."""
        return float(self.head_dim**-0.5)

    @property
    def n_parameters(self) -> int:
        """Weights, a tied head counted once."""
        h, f = self.hidden_size, self.ffn_size
        attention = h * (2 * self.q_size + 2 * self.kv_size) + 2 * self.head_dim * self.qk_norm
        biases = self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.o_bias * h + self.mlp_bias * (2 * f + h)
        layer = attention + biases + 3 * h * f + 2 * h
        return self.n_layers * layer + h + (2 - self.tie_embeddings) * self.vocab_size * h


def read_arch(folder: pathlib.Path, overrides: Mapping[str, Any] | None = None) -> ModelArch:
    """The architecture in `folder`/config.json, or in the metadata of a GGUF file, with `overrides` (`hf_overrides`).

    Raises ConfigError (LoadError for a GGUF file) naming the field, its value and the limit.
    """
    if is_gguf(folder):
        return _read_gguf_arch(read_header(folder), overrides or {})
    if folder.is_dir() and not os.path.lexists(folder / "config.json"):
        raise ConfigError(no_model(folder))
    where = "config.json with hf_overrides" if overrides else "config.json"
    return parse_arch(merged(read_object(folder / "config.json"), overrides or {}), where)


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those of `overrides`: objects in both are merged, and null takes a field away."""
    found = dict(values)
    for name, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = merged(found[name], value)
        elif value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def _read_gguf_arch(header: Header, overrides: Mapping[str, Any]) -> ModelArch:
    config = merged(config_of(header), overrides)
    try:
        arch = parse_arch(config, str(header.path))
    except ConfigError as error:
        key = key_of(header, error.param)
        raise LoadError(f"{error.message}{f'; it comes from the key {key}' if key else ''}") from None
    divisors = rope_divisors(header, arch.head_dim)
    if not divisors:
        return arch
    if arch.rope.type != "default":
        raise LoadError(f"{header.path} has both rope_freqs.weight and rope scaling of type {arch.rope.type}")
    return msgspec.structs.replace(arch, rope=msgspec.structs.replace(arch.rope, type=DIVIDED, divisors=divisors))


def parse_arch(config: dict[str, Any], where: str = "config.json") -> ModelArch:
    """`ModelArch` from a decoded config.json; see `read_arch`. `where` names it in errors."""
    _refuse_custom_code(config, where, 0)
    fields = Fields(config, where)
    family = _family(fields)
    _refuse_unsupported(fields)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    n_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    n_heads, n_kv_heads, head_dim = _heads(fields, family, hidden_size)
    max_position = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    rope = parse_rope(fields, max_position)
    attention_bias = family.reads_attention_bias and fields.flag("attention_bias", False)
    return ModelArch(
        family=family.name,
        n_layers=n_layers,
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        vocab_size=vocab_size,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_position=_stated_context(rope, max_position),
        max_position_scaled=_scaled_context(rope, max_position),
        rms_eps=fields.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        rope=rope,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        windows=_windows(fields, family, n_layers),
        dtype=_dtype(fields),
        eos_token_ids=token_ids(fields, "eos_token_id", vocab_size),
        bos_token_id=next(iter(token_ids(fields, "bos_token_id", vocab_size)), None),
    )


def token_ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """Ids under `name`: an integer, a list, or absent (none). Raises ConfigError unless all are below vocab_size."""
    value = fields.values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_EOS or not all(is_integer(i) and 0 <= i < vocab_size for i in ids):
        raise fields.error(name, f"a token id below vocab_size = {vocab_size:,}, or at most {MAX_EOS} of them")
    return tuple(ids)


def _refuse_custom_code(value: Any, where: str, depth: int) -> None:
    if depth > MAX_NESTING:
        raise ConfigError(f"{where} is nested more than {MAX_NESTING} levels deep")
    if isinstance(value, dict):
        if "auto_map" in value:
            raise ConfigError(
                f"{where}: auto_map = {shown(value['auto_map'])} asks for code from the checkpoint; it is never run."
                " Use a checkpoint of a built-in architecture.",
                param="auto_map",
            )
        for key, inner in value.items():
            _refuse_custom_code(inner, f"{where}: {shown(key)}", depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _refuse_custom_code(inner, where, depth + 1)


def _family(fields: Fields) -> Family:
    """By `architectures`, or by `model_type` where a config.json has no architectures; both must agree."""
    names = fields.values.get("architectures")
    if names is None:
        for family in FAMILIES.values():
            if family.model_type == fields.values.get("model_type"):
                return family
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"a list with one of {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        raise ConfigError(f"{fields.where}: architectures: {not_supported(names[0], FAMILIES)}", param="architectures")
    family = FAMILIES[names[0]]
    fields.choice("model_type", (family.model_type,), family.model_type)
    return family


def _refuse_unsupported(fields: Fields) -> None:
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    if "quantization_config" in fields:
        raise ConfigError(f"{fields.where}: {quantised_with(fields)}", param="quantization_config")
    if fields.values.get("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", "false")


def _heads(fields: Fields, family: Family, hidden_size: int) -> tuple[int, int, int]:
    n_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    n_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, family.n_kv_heads or n_heads)
    if n_heads % n_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {n_heads}")
    if "head_dim" not in fields and family.head_dim is None and hidden_size % n_heads:
        raise fields.error("num_attention_heads", f"a divisor of hidden_size = {hidden_size}, as head_dim is not given")
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, family.head_dim or hidden_size // n_heads)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ConfigError(
            f"{fields.where}: head_dim = {head_dim} must be an even number from 2 to {MAX_HEAD_DIM}", param="head_dim"
        )
    return n_heads, n_kv_heads, head_dim


def _stated_context(rope: Rope, max_position: int) -> int:
    """YaRN checkpoints state the original context or the extended one; both mean factor x original."""
    if rope.type == "yarn":
        return min(MAX_POSITIONS, max(max_position, int(rope.original_max_position * rope.factor)))
    return max_position


def _scaled_context(rope: Rope, max_position: int) -> int:
    """Linear and dynamic scaling: some checkpoints count the factor in max_position_embeddings and some do not."""
    if rope.type in ("linear", "dynamic"):
        return min(MAX_POSITIONS, int(max_position * rope.factor))
    return _stated_context(rope, max_position)


def _windows(fields: Fields, family: Family, n_layers: int) -> tuple[int, ...]:
    if family.window == "none":
        return (0,) * n_layers
    if family.window == "uniform":
        if len(set(_layer_types(fields, n_layers))) > 1:
            raise fields.error("layer_types", "the same for every layer of a Mistral model")
        # The key's absence and null differ: transformers' default is 4096, null switches the window off.
        null = "sliding_window" in fields.values and "sliding_window" not in fields
        return (0 if null else fields.integer("sliding_window", 1, 2**31, 4096),) * n_layers
    window = fields.integer("sliding_window", 1, 2**31, 4096) if fields.flag("use_sliding_window", False) else 0
    types = _layer_types(fields, n_layers)
    if not types:
        first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
        return tuple(window if layer >= first else 0 for layer in range(n_layers))
    if not window and "sliding_attention" in types:
        raise fields.error("layer_types", "all full_attention, as use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _layer_types(fields: Fields, n_layers: int) -> list[str]:
    types = fields.values.get("layer_types")
    if types is None:
        return []
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in known for kind in types):
        raise fields.error("layer_types", f"num_hidden_layers = {n_layers} entries, each {' or '.join(known)}")
    return types


def _dtype(fields: Fields) -> str:
    """transformers 5 writes `dtype`, older ones `torch_dtype`; none means float32."""
    name = "dtype" if "dtype" in fields else "torch_dtype"
    return fields.choice(name, DTYPES, "float32")
