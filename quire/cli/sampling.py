"""Sampling flags of `quire generate` and `quire chat`, and the `SamplingParams` they make.

Owns which parameters are flags, and the defaults of the commands. Does not own types, bounds and meaning, which are
those of `SamplingParams`.
"""

from __future__ import annotations

import argparse
import typing
from typing import Any, Final

import msgspec

from quire.config.flags import read_flags
from quire.core.sampling import OutputKind, SamplingParams

NO_FLAGS: Final = frozenset(
    (
        "seed",  # that of the engine fixes the answers of requests that bring none
        "logprobs",  # only the text is written
        "prompt_logprobs",
        "detokenize",
        "output_kind",
        "structured_outputs",
        "allowed_token_ids",
        "logit_bias",
        "deterministic",  # an option of the engine, for all its requests
    )
)
"""Parameters that are no flags, as a command line cannot carry them or they would do nothing."""
DEFAULTS: Final[dict[str, Any]] = {"max_tokens": 256, "temperature": 0.7}
"""Where the commands differ from `SamplingParams`."""


def flags_of(params: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The fields of `params` that make sense on a command line, with the defaults of the commands."""
    hints = typing.get_type_hints(params, include_extras=True)
    fields: list[Any] = []
    for field in msgspec.structs.fields(params):
        if field.name not in NO_FLAGS:
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            fields.append((field.name, hints[field.name], DEFAULTS.get(field.name, default)))
    return msgspec.defstruct("SamplingFlags", fields, kw_only=True, module=__name__)


SamplingFlags: Final = flags_of(SamplingParams)


def sampling_params(namespace: argparse.Namespace, kind: OutputKind) -> SamplingParams:
    """The parameters that the command line describes; what it leaves open comes from `SamplingFlags`."""
    flags = read_flags(namespace, SamplingFlags)
    return SamplingParams(**msgspec.structs.asdict(flags), output_kind=kind)
