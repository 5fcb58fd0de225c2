"""Sampling flags of `quire generate` and `quire chat`, and the `SamplingParams` they make."""

from __future__ import annotations

import argparse
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.config.flags import read_flags
from quire.core.sampling import MAX_N, OutputKind, SamplingParams


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


class SamplingFlags(msgspec.Struct, kw_only=True):
    """The fields of `SamplingParams` that make sense on a command line, with the defaults of the commands.

    There is no seed here: `--seed` of the engine fixes the answers of requests that bring none.
    """

    max_tokens: Annotated[int, _doc("Longest answer in tokens.", ge=1)] = 256
    temperature: Annotated[float, _doc("0 takes the most probable token; higher is more varied.", ge=0, le=100)] = 0.7
    top_p: Annotated[float, _doc("Keep the smallest set of tokens with this probability.", gt=0, le=1)] = 1.0
    top_k: Annotated[int, _doc("Keep the k most probable tokens; 0 keeps all.", ge=-1)] = 0
    min_p: Annotated[float, _doc("Drop tokens below this share of the most probable one.", ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, _doc("Lowers tokens that were generated already.", ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, _doc("Lowers tokens by how often they were generated.", ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, _doc("Above 1 lowers tokens of prompt and answer.", gt=0, le=10)] = 1.0
    stop: Annotated[list[str], _doc("Strings that end the answer.")] = []
    ignore_eos: Annotated[bool, _doc("Go on after the model's end token.")] = False
    n: Annotated[int, _doc("Answers for each prompt.", ge=1, le=MAX_N)] = 1


def sampling_params(namespace: argparse.Namespace, kind: OutputKind) -> SamplingParams:
    """The parameters that the command line describes; what it leaves open comes from `SamplingFlags`."""
    flags = read_flags(namespace, SamplingFlags)
    return SamplingParams(**msgspec.structs.asdict(flags), output_kind=kind)
