"""Sampling flags of `quire generate` and `quire chat`, and the `SamplingParams` they make.

Owns which parameters are flags, and where the values of those that are not given come from. Does not own types, bounds
and meaning, which are those of `SamplingParams`.
"""

from __future__ import annotations

import argparse
import typing
from typing import TYPE_CHECKING, Any, Final

import msgspec

from quire.config.flags import given_values, read_flags
from quire.core.sampling import OutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm import LLM

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
"""Where the commands differ from `SamplingParams`, for a model that proposes nothing."""


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


def check_sampling(namespace: argparse.Namespace) -> None:
    """ConfigError or InvalidParameter if no model could do what the command line asks for; before one is loaded."""
    SamplingParams(**msgspec.structs.asdict(read_flags(namespace, SamplingFlags)))


def sampling_params(namespace: argparse.Namespace, kind: OutputKind, llm: LLM) -> SamplingParams:
    """What the command line asks for; what it leaves open is what the model's generation_config.json proposes, and for
    the rest `DEFAULTS`. InvalidParameter if these do not go together."""
    params = llm.get_default_sampling_params(**DEFAULTS)
    given = given_values(namespace, SamplingFlags)
    return msgspec.structs.replace(params, **given, output_kind=kind)
