"""generation_config.json: the end tokens and default sampling that a checkpoint proposes.

Optional advice, so a damaged file or value is a warning and is left out; nothing here can stop a model from loading.
"""

from __future__ import annotations

import logging
import pathlib
from typing import Final

import msgspec

from quire.config.arch import ModelArch, token_ids
from quire.config.fields import Fields, read_object
from quire.core.errors import ConfigError, InvalidParameter
from quire.core.sampling import SamplingParams

SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that transformers and `SamplingParams` share in name and meaning."""
_logger = logging.getLogger(__name__)


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What a checkpoint says about generation."""

    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence: generation_config.json's, or config.json's where it names none."""
    sampling: dict[str, float]
    """Defaults for `SamplingParams` by field name; empty when none are given. `do_sample` false gives temperature 0."""


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
    given = {name: fields.values[name] for name in SAMPLING_FIELDS if name in fields}
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
