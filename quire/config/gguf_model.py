"""What the metadata of a GGUF file means as a model: the config.json that the same model would have. Torch-free.

Owns the keys that architectures share, and what of them is not supported.
Does not own the file's layout (`config/gguf`) nor limits on values (`config/arch`).
"""

from __future__ import annotations

import math
from typing import Any, Final

from quire.config.advice import not_supported
from quire.config.families import FAMILIES, Gguf
from quire.config.fields import Fields, is_integer
from quire.config.gguf import Header, Tensor
from quire.config.model_fields import MTP_MODULES
from quire.core.errors import LoadError, shown


def _architectures() -> dict[str, tuple[str, Gguf]]:
    found: dict[str, tuple[str, Gguf]] = {}
    for name, family in FAMILIES.items():
        if family.gguf is not None:
            found.setdefault(family.gguf.architecture, (name, family.gguf))
    return found


ARCHITECTURES: Final = _architectures()
"""general.architecture → (architecture name in config.json, of the first family that has it; what its files are)."""
ROPE_FREQS: Final = "rope_freqs.weight"
LONG_FACTORS: Final = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""Field of `rope_parameters` of type longrope → tensor."""
ROPE_TENSORS: Final = (ROPE_FREQS, *LONG_FACTORS.values())
PARTIAL: Final = "partial_rotary_factor"
"""Field of config.json; under its key (`Gguf.optional`) a file has how many dimensions are rotated."""
ROTATED: Final = "rope.dimension_count"
KEYS: Final = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "head_dim": "attention.key_length",
    "factor": "rope.scaling.factor",
    "rope_type": "rope.scaling.type",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
"""Field of config.json → key after the architecture's name."""
REQUIRED: Final = (
    *("max_position_embeddings", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"),
    "rms_norm_eps",
)
PLAIN: Final = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_count": (0,),
    "expert_gating_func": (1, 0),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0, 0.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "logit_scale": (1.0, 0.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Key → the values that mean 'not used'. Others would be computed wrongly, so they are refused."""
DTYPES: Final = {"F32": "float32", "F16": "float16"}
"""Type of most weights → dtype to compute in; bfloat16 for all others."""
THETA: Final = 10_000.0
"""rope.freq_base of a file that does not say it."""
SCALINGS: Final = ("linear", "yarn")
END_IDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
END_OF_TURN: Final = "<end_of_turn>"
GEMMA_MARKS: Final = frozenset(("<start_of_turn>", END_OF_TURN))
"""Control tokens whatever their type: Google's own files of Gemma 3 have them as normal ones."""
MESSAGE_END: Final = "<|end|>"
HARMONY_ENDS: Final = frozenset(("<|return|>", "<|call|>"))
"""Control tokens of gpt-oss that end a turn; where both are there, `MESSAGE_END` ends one of several messages in it."""
END_TEXTS: Final = HARMONY_ENDS | {
    *("<|eot_id|>", "<|im_end|>", MESSAGE_END, END_OF_TURN, "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    "</s>",
}
"""Control tokens that end a turn by their name, whatever the ids say, as in llama.cpp."""
CONTROL: Final = 3
"""Token type of control tokens."""


def layout_of(header: Header) -> tuple[str, Gguf]:
    """(architecture name in config.json, what its files are). Raises LoadError."""
    name = header.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise LoadError(
            f"{header.path}: general.architecture: {not_supported(name, ARCHITECTURES)} Mistral and Mixtral models are"
            " 'llama'."
        )
    found = ARCHITECTURES[name]
    for key, other in found[1].variants.items():
        layout = FAMILIES[other].gguf
        if layout is not None and header.values.get(f"{name}.{key}"):
            return other, layout
    return found


def config_of(header: Header) -> dict[str, Any]:
    """The fields of config.json that `parse_arch` reads, with the checks that need the file's own names.

    Raises LoadError naming key, value and what is supported.
    """
    architecture, layout = layout_of(header)
    name = layout.architecture
    values = {key.removeprefix(name + "."): value for key, value in header.values.items() if key.startswith(name + ".")}
    keys = _keys(layout)
    config = {field: values[key] for field, key in keys.items() if key in values}
    for field in (*REQUIRED, *layout.keys):
        if field not in config:
            raise LoadError(f"{header.path}: {name}.{keys[field]} is missing")
    _refuse_special(header, name, values, layout)
    rope: dict[str, Any] = {
        field: config.pop(field) for field in ("factor", "rope_type", "beta_fast", "beta_slow") if field in config
    }
    if is_integer(config.get(MTP_MODULES)) and is_integer(config["num_hidden_layers"]):
        config["num_hidden_layers"] -= config[MTP_MODULES]  # the last of the blocks
    head_dim = _head_dim(header, layout, values, config)
    if PARTIAL in layout.optional:
        config[PARTIAL] = _share(header, layout, config.get(PARTIAL, head_dim), head_dim)
    defaults = {"num_key_value_heads": config["num_attention_heads"], "rope_theta": THETA}
    return {**defaults, **config} | {
        "architectures": [architecture],
        "vocab_size": _embedding(header).shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "dtype": _dtype(header),
        "head_dim": head_dim,
        "rope_scaling": _scaling(header, rope, values, config, layout),
        "eos_token_id": _end_ids(header),
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        **_window(layout, config),
        **_query_scale(layout, config, head_dim),
        **layout.fields,
    }


def _keys(layout: Gguf) -> dict[str, str]:
    return {**KEYS, **layout.keys, **layout.optional}


def rope_divisors(header: Header, head_dim: int) -> tuple[float, ...]:
    """What each rotary frequency is divided by, from the tensor rope_freqs.weight (Llama 3); empty without it."""
    return _divisors(header, ROPE_FREQS, head_dim) if ROPE_FREQS in header.tensors else ()


def _divisors(header: Header, name: str, rotary_dim: int) -> tuple[float, ...]:
    tensor = header.tensors.get(name)
    if tensor is None:
        raise LoadError(f"{header.path}: the tensor {name} is missing")
    if tensor.dtype != "F32" or tensor.shape != (rotary_dim // 2,):
        raise LoadError(
            f"{header.path}: {name} is {tensor.dtype} of shape {tensor.shape}; it must be F32 ({rotary_dim // 2},)"
        )
    divisors = tuple(header.floats(tensor))
    for divisor in divisors:
        if not math.isfinite(divisor) or not 1e-4 <= divisor <= 1e6:
            raise LoadError(f"{header.path}: {name} holds {divisor}; values from 0.0001 to 1,000,000 are allowed")
    return divisors


def key_of(header: Header, field: str | None) -> str:
    """The file's key for a field of config.json, to be named in an error; empty if there is none."""
    layout = layout_of(header)[1]
    keys = _keys(layout)
    return f"{layout.architecture}.{keys[field]}" if field in keys else ""


def _embedding(header: Header) -> Tensor:
    tensor = header.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        there = "no tensor" if tensor is None else f"shape {tensor.shape} for"
        raise LoadError(f"{header.path}: {there} token_embd.weight; it must be there with two dimensions")
    return tensor


def _refuse_special(header: Header, name: str, values: dict[str, Any], layout: Gguf) -> None:
    read = {*layout.keys.values(), *layout.optional.values()}
    for key, neutral in {**PLAIN, **layout.plain}.items():
        if key in values and key not in read and values[key] not in neutral:
            raise LoadError(
                f"{header.path}: {name}.{key} = {shown(values[key])} is not supported; only {neutral[0]} is"
            )


def _share(header: Header, layout: Gguf, rotary_dim: Any, head_dim: Any) -> float:
    """Of a head's dimensions, which is rotated."""
    if not is_integer(rotary_dim) or not is_integer(head_dim) or not 0 < rotary_dim <= head_dim:
        raise LoadError(
            f"{header.path}: {layout.architecture}.{layout.optional[PARTIAL]} = {shown(rotary_dim)} must be from 1 to"
            f" {shown(head_dim)}, the width of a head"
        )
    return float(rotary_dim / head_dim)


def _head_dim(header: Header, layout: Gguf, values: dict[str, Any], config: dict[str, Any]) -> Any:
    """key_length, else hidden_size / heads. The width of values must be the same, and in most of what is rotated."""
    head_dim = config.get("head_dim", _width_by_heads(config))
    same = ("attention.value_length",) if PARTIAL in layout.optional else ("attention.value_length", ROTATED)
    for key in same:
        if head_dim is not None and key in values and values[key] != head_dim:
            raise LoadError(
                f"{header.path}: {layout.architecture}.{key} = {shown(values[key])} must be {shown(head_dim)}, the"
                " width of a head"
            )
    return head_dim


def _query_scale(layout: Gguf, config: dict[str, Any], head_dim: Any) -> dict[str, Any]:
    if not layout.n_layers_by_width:
        return {}
    by_width = config["num_hidden_layers"] == layout.n_layers_by_width
    return {"query_pre_attn_scalar": _width_by_heads(config) if by_width else head_dim}


def _width_by_heads(config: dict[str, Any]) -> int | None:
    """None where it is no whole number, or the two are none."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    divides = is_integer(heads) and is_integer(hidden) and heads > 0 and hidden % heads == 0
    return hidden // heads if divides else None


def _scaling(
    header: Header, rope: dict[str, Any], values: dict[str, Any], config: dict[str, Any], layout: Gguf
) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json, None without scaling."""
    kind = rope.get("rope_type", "linear" if "rope.scale_linear" in values else "none")
    if any(name in header.tensors for name in LONG_FACTORS.values()):
        return _long(header, kind, values, config)
    if kind == "none":
        return None
    if kind not in SCALINGS:
        at = f"{header.values['general.architecture']}.{KEYS['rope_type']}"
        raise LoadError(f"{header.path}: {at} = {shown(kind)} must be one of {', '.join(('none', *SCALINGS))}")
    scaling = rope | {"rope_type": kind}
    scaling.setdefault("factor", values.get("rope.scale_linear"))
    if kind == "linear" and scaling["factor"] == 1:
        return None
    if kind == "yarn":
        fields = Fields(values, str(header.path))
        factor = fields.number("rope.scaling.factor", 1.0, 1e4)
        # YaRN's own temperature times the file's factor.
        extra = fields.number("rope.scaling.yarn_attn_factor", 1e-6, 1e6, 1.0)
        extra *= fields.number("rope.scaling.attn_factor", 1e-6, 1e6, 1.0)
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
        scaling.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        scaling |= layout.yarn
    return scaling


def _long(header: Header, kind: Any, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` of a file with what longrope divides frequencies by, in two tensors."""
    if kind not in ("none", "longrope") or ROPE_FREQS in header.tensors:
        other = ROPE_FREQS if ROPE_FREQS in header.tensors else f"rope scaling of type {shown(kind)}"
        raise LoadError(f"{header.path} has both {' and '.join(LONG_FACTORS.values())} and {other}")
    width: Any = values.get(ROTATED, config.get("head_dim", _width_by_heads(config)))
    found: dict[str, Any] = {
        field: list(_divisors(header, name, width if is_integer(width) else 0)) for field, name in LONG_FACTORS.items()
    }
    if "rope.scaling.attn_factor" in values:
        found["attention_factor"] = values["rope.scaling.attn_factor"]
    return {"rope_type": "longrope", **found}


def _window(layout: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    """A sliding window holds in every layer, or where the family says; one as long as the context is none."""
    if "sliding_window" in layout.keys or "sliding_window" in layout.optional:
        return {}
    window, context = config.get("sliding_window"), config["max_position_embeddings"]
    if not window or (is_integer(window) and is_integer(context) and window >= context):
        return {"sliding_window": None}
    return {"use_sliding_window": True, "max_window_layers": 0}


def _dtype(header: Header) -> str:
    n_bytes: dict[str, int] = {}
    for tensor in header.tensors.values():
        n_bytes[tensor.dtype] = n_bytes.get(tensor.dtype, 0) + tensor.n_bytes
    return DTYPES.get(max(n_bytes, key=lambda dtype: n_bytes[dtype]), "bfloat16")


def _end_ids(header: Header) -> list[Any]:
    named = [header.values.get(f"tokenizer.ggml.{key}") for key in END_IDS]
    found = {token_id: None for token_id in named if token_id is not None}
    types = header.numbers("tokenizer.ggml.token_type")
    by_name = {
        token: token_id
        for token_id, token in enumerate(header.strings("tokenizer.ggml.tokens"))
        if token in END_TEXTS
        and (token == END_OF_TURN or (token_id < len(types) and types[token_id] == CONTROL))
    }
    found |= dict.fromkeys(by_name.values())
    if by_name.keys() >= HARMONY_ENDS:
        found.pop(by_name.get(MESSAGE_END), None)
    return list(found)
