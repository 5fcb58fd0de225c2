"""From a checkpoint's config.json, or a GGUF file's metadata, to its `ModelArch`. Torch-free.

Owns which file is read, overrides, and what is refused whatever the family. Does not own what keys mean (`families`).
Code shipped with a checkpoint is never imported: its mention is an error unless the architecture is one of ours.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import re
import shlex
from collections.abc import Container, Mapping
from typing import Any, Final

import msgspec

from quire.config.advice import no_model, not_supported
from quire.config.arch import ModelArch
from quire.config.attention import AttentionSpec
from quire.config.codings import modelopt, read_codings
from quire.config.families import FAMILIES, Family
from quire.config.fields import Fields, Watched, is_integer, read_object
from quire.config.gguf import Header, is_gguf, read_header
from quire.config.gguf_model import config_of, key_of, rope_divisors
from quire.config.model_fields import ModelFields
from quire.config.rope import DIVIDED
from quire.core.errors import ConfigError, LoadError, shown
from quire.core.spelling import did_you_mean

MAX_NESTING: Final = 64
CODE: Final = "auto_map"
"""Key by which a config.json names classes in Python files of the checkpoint."""
N_LAYERS: Final = "num_hidden_layers"
_WORD: Final = re.compile(r"\w+")
DECODER: Final = {
    "is_encoder_decoder": False, "add_cross_attention": False, "is_causal": True, "use_bidirectional_attention": False,
}  # fmt: skip
"""Keys with which transformers makes something else of any family → their only value in a decoder."""


def read_arch(
    folder: pathlib.Path, overrides: Mapping[str, Any] | None = None, logger: logging.Logger | None = None
) -> ModelArch:
    """The architecture in `folder`/config.json, or in the metadata of a GGUF file, with `overrides` (`hf_overrides`).

    logger: told what the checkpoint asks for and is not needed; given by the one reader that loads the weights.
    Raises ConfigError (LoadError for a GGUF file) naming the field, its value and the limit.
    """
    if is_gguf(folder):
        return _read_gguf_arch(read_header(folder), overrides or {})
    if folder.is_dir() and not os.path.lexists(folder / "config.json"):
        raise ConfigError(no_model(folder))
    where = "config.json with hf_overrides" if overrides else "config.json"
    stored = _stored(folder)
    config = Watched(merged(stored, overrides or {}))
    try:
        arch = parse_arch(config, where)
    except ConfigError as error:
        raise ConfigError(error.message + _goes_with(error, overrides or {}), param=error.param) from None
    _refuse_unread(overrides or {}, stored, config)
    if logger is not None and config.get(CODE):
        named = _family(Fields(config, where)).architecture
        logger.info("%s's auto_map is not followed: Quire has its own %s and runs no code of checkpoints", where, named)
    return arch


def _stored(folder: pathlib.Path) -> dict[str, Any]:
    """config.json, with what ModelOpt may say in a file beside it."""
    stored, beside = read_object(folder / "config.json"), folder / modelopt.FILE
    if stored.get("quantization_config") is None and beside.exists():
        said = modelopt.of_file(read_object(beside))
        stored |= {} if said is None else {"quantization_config": said}
    return stored


def assumed_words(folder: pathlib.Path) -> str:
    """For an error about shapes: which integers config.json does not give, and what is taken for them; or nothing."""
    config = Watched(_stored(folder))
    parse_arch(config)
    return _lacking(config)


def _lacking(config: Watched, names: Container[str] | None = None) -> str:
    """names: the only keys that may be told of; None: all."""
    assumed = config.assumed.items() if names is None else [one for one in config.assumed.items() if one[0] in names]
    found = [f"{name} ({value:,})" for name, value in assumed if value]
    return f"; absent keys count as their defaults: {', '.join(found)}" if found else ""


def _goes_with(error: ConfigError, overrides: Mapping[str, Any]) -> str:
    """What to add to an error about a key that has something of each layer, where only their number was overridden."""
    if error.param is None or error.param == N_LAYERS or {error.param, N_LAYERS} & {*overrides} != {N_LAYERS}:
        return ""
    return f"; override {error.param}, too, as {N_LAYERS} is overridden" if N_LAYERS in error.message else ""


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


def parse_arch(config: dict[str, Any], where: str = "config.json") -> ModelArch:
    """`ModelArch` from a decoded config.json; see `read_arch`. `where` names it in errors."""
    fields = Fields(config, where)
    _refuse_inner_code(config, where)
    try:
        family = _family(fields)
    except ConfigError as error:
        if CODE not in config:
            raise
        code = f"Its auto_map = {shown(config[CODE])} asks for code from the checkpoint, which is never run."
        raise ConfigError(f"{error.message.rstrip('.')}. {code}", param=error.param) from None
    codings = read_codings(fields)
    watched = config if isinstance(config, Watched) else Watched(config)
    values = watched.with_values(**{name: value for name, value in family.assumed.items() if name not in config})
    model_fields = ModelFields(values, where, family.name, family.keys)
    for name, value in DECODER.items():
        model_fields.only(name, value)
    if config.get("per_layer_config"):
        raise fields.error("per_layer_config", "absent: layers that differ are not read from there")
    try:
        return msgspec.structs.replace(family.describe(model_fields), codings=codings)
    except ConfigError as error:
        if error.param is None or not is_integer(config.get(error.param)):
            raise  # no contradiction of sizes
        said = set(_WORD.findall(error.message)) - {error.param}
        said |= {own for name, own in family.keys.items() if name in said}
        raise ConfigError(error.message + _lacking(values, said), param=error.param) from None


def _refuse_unread(overrides: Mapping[str, Any], stored: Mapping[str, Any], config: Watched) -> None:
    """ConfigError for a field of `hf_overrides` that the checkpoint has not and nothing has asked for.

    stored: without the overrides; config: with them, after it was read. A null takes away what is not there.
    """
    for name, value in overrides.items():
        if value is None or name in stored or name in config.asked:
            continue
        family = _family(Fields(config, "config.json"))
        hint = f"; {family.name} has it as {family.keys[name]}" if name in family.keys else ""
        hint = hint or did_you_mean(name, sorted({*config.asked, *stored}))
        raise ConfigError(
            f"hf_overrides: {name} = {shown(value)} changes nothing: the checkpoint has no such field, and nothing"
            f" reads it in this {family.name} model{hint}",
            param="hf_overrides",
        )


def _read_gguf_arch(header: Header, overrides: Mapping[str, Any]) -> ModelArch:
    stored = config_of(header)
    config = Watched(merged(stored, overrides))
    try:
        arch = parse_arch(config, str(header.path))
    except ConfigError as error:
        key = key_of(header, error.param)
        came = f"; it comes from the key {key}" if key else ""
        raise LoadError(f"{error.message}{came}{_goes_with(error, overrides)}") from None
    _refuse_unread(overrides, stored, config)
    divisors = rope_divisors(header, arch.head_dim)
    return _with_divisors(arch, divisors, header) if divisors else arch


def _with_divisors(arch: ModelArch, divisors: tuple[float, ...], header: Header) -> ModelArch:
    """The description with frequencies divided as the file says."""
    replace, layers = msgspec.structs.replace, []
    for layer in arch.layers:
        rope = layer.mixer.rope
        if rope is not None and rope.type != "default":
            raise LoadError(f"{header.path} has both rope_freqs.weight and rope scaling of type {rope.type}")
        if rope is not None and isinstance(layer.mixer, AttentionSpec):
            mixer = replace(layer.mixer, rope=replace(rope, type=DIVIDED, divisors=divisors))
            layers.append(replace(layer, mixer=mixer))
        else:
            layers.append(layer)  # some layers of SmolLM 3 have no positions
    return replace(arch, layers=tuple(layers))


def _refuse_inner_code(config: dict[str, Any], where: str) -> None:
    """ConfigError for code that a part of config.json asks for: no family here reads such a part."""
    for name, part in config.items():
        if name != CODE:
            _refuse_code(part, f"{where}: {shown(name)}", json.dumps({name: None}), 1)


def _refuse_code(value: Any, where: str, without: str, depth: int) -> None:
    if depth > MAX_NESTING:
        raise ConfigError(f"{where} is nested more than {MAX_NESTING} levels deep")
    if isinstance(value, dict):
        if CODE in value:
            raise ConfigError(
                f"{where}: auto_map = {shown(value[CODE])} asks for code from the checkpoint; it is never run."
                f" To leave that part out: --hf-overrides {shlex.quote(without)}.",
                param=CODE,
            )
        for key, inner in value.items():
            _refuse_code(inner, f"{where}: {shown(key)}", without, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _refuse_code(inner, where, without, depth + 1)


def _family(fields: Fields) -> Family:
    """By `architectures`, or by `model_type` where a config.json has no architectures; both must agree."""
    names = fields.values.get("architectures")
    if names is None:
        for family in FAMILIES.values():
            if family.model_type == fields.values.get("model_type"):
                return family
        for advice in filter(None, (family.other_layout(fields) for family in FAMILIES.values())):
            raise ConfigError(f"{fields.where}: {advice}", param="architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"a list with one of {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        raise ConfigError(f"{fields.where}: architectures: {not_supported(names[0], FAMILIES)}", param="architectures")
    family = FAMILIES[names[0]]
    fields.choice("model_type", (family.model_type,), family.model_type)
    return family
