"""generation_config.json: the end tokens and default sampling that a checkpoint proposes.

Optional advice, so a damaged file or value is a warning and is left out, and does not stop a model from loading. What
the operator gives in its place (`override_generation_config`) is no advice: it is honoured or refused.
"""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import msgspec

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.fields import Fields, read_object
from quire.config.model_fields import token_ids
from quire.core.errors import ConfigError, InvalidParameter, shown
from quire.core.sampling import PROPOSED_FIELDS, SamplingParams

_logger = logging.getLogger(__name__)


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What a checkpoint says about generation."""

    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence: generation_config.json's, or config.json's where it names none."""
    sampling: dict[str, float]
    """Defaults for `SamplingParams` by field name; empty when none are given. `do_sample` false gives temperature 0."""


def generation_defaults(config: EngineConfig, folder: pathlib.Path, arch: ModelArch) -> GenerationDefaults:
    """What the model in `folder` proposes, as `generation_config` and `override_generation_config` say.

    Raises ConfigError for a folder that is none and for a field of the override that cannot be honoured.
    """
    if config.generation_config == "vllm":
        found = GenerationDefaults(arch.eos_token_ids, {})
    elif config.generation_config == "auto":
        found = read_generation(folder, arch)
    else:
        place = pathlib.Path(config.generation_config).expanduser()
        if not (place / "generation_config.json").exists():
            raise ConfigError(
                f"generation_config = {shown(config.generation_config)} must be auto, vllm, or a folder with a"
                " generation_config.json",
                param="generation_config",
            )
        found = read_generation(place, arch)
    return _overridden(found, config.override_generation_config, arch)


def _overridden(found: GenerationDefaults, values: dict[str, Any], arch: ModelArch) -> GenerationDefaults:
    name = "override_generation_config"
    usable = (*PROPOSED_FIELDS, "do_sample", "eos_token_id")
    for field in values:
        if field not in usable:
            raise ConfigError(f"{name} has {shown(field)}: it can have {', '.join(usable)}", param=name)
    fields = Fields(values, name)
    sampling = {field: value for field, value in found.sampling.items() if field not in values}
    given = {field: value for field, value in values.items() if field in PROPOSED_FIELDS and value is not None}
    if not fields.flag("do_sample", True):
        given["temperature"] = 0.0
    try:
        SamplingParams(**given).verify(arch.vocab_size)
    except InvalidParameter as error:
        raise ConfigError(f"{name}: {error.message}", param=name) from None
    eos = token_ids(fields, "eos_token_id", arch.vocab_size) if "eos_token_id" in fields else found.eos_token_ids
    return GenerationDefaults(eos, sampling | given)


def read_generation(folder: pathlib.Path, arch: ModelArch) -> GenerationDefaults:
    """The defaults in `folder`/generation_config.json, which may be absent. Never raises; bad values are logged."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(arch.eos_token_ids, {})
    try:
        fields = Fields(read_object(path, max_bytes=1 << 20), path.name)
    except ConfigError as error:
        _logger.warning("ignored: %s", error.message)
        return GenerationDefaults(arch.eos_token_ids, {})
    return GenerationDefaults(_eos(fields, arch), _sampling(fields, arch.vocab_size))


def _eos(fields: Fields, arch: ModelArch) -> tuple[int, ...]:
    try:
        return token_ids(fields, "eos_token_id", arch.vocab_size) or arch.eos_token_ids
    except ConfigError as error:
        _logger.warning("ignored: %s", error.message)
        return arch.eos_token_ids


def _sampling(fields: Fields, vocab_size: int) -> dict[str, float]:
    given = {name: fields.values[name] for name in PROPOSED_FIELDS if name in fields}
    if fields.values.get("do_sample") is False:
        given["temperature"] = 0.0
    accepted: dict[str, float] = {}
    for name, value in given.items():
        try:
            SamplingParams(**{name: value}).verify(vocab_size)
            accepted[name] = value
        except InvalidParameter as error:
            _logger.warning("%s: ignored: %s", fields.where, error.message)
    return accepted
