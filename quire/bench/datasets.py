"""What is asked in a benchmark: prompts of random token ids and output lengths.

Invariant: a dataset is a function of the repetition, so each repetition has the same lengths and fresh tokens, and
no repetition can live off the prefix cache of the one before.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Annotated

import msgspec

from quire.core.errors import ConfigError, shown
from quire.core.files import read_regular
from quire.planner.workload import MOST_TOKENS

TOKEN_LIMIT = 10_001
"""Random ids are below this, as in nano-vllm's benchmark (0 to 10000)."""
MAX_LENGTHS_BYTES = 256 << 20
"""Of a lengths file."""
WARM_UP = -1
"""The repetition whose tokens the warm-up uses."""


@dataclasses.dataclass(slots=True)
class BenchRequest:
    """One prompt and the number of tokens to generate for it (`ignore_eos`)."""

    prompt_token_ids: list[int]
    output_len: int


Dataset = Callable[[int], list[BenchRequest]]
"""Repetition (0, 1, ... or `WARM_UP`) → requests."""


class LengthsFile(msgspec.Struct):
    """A JSON file of lengths: request i has `input[i]` prompt tokens and `output[i]` output tokens."""

    input: list[Annotated[int, msgspec.Meta(le=MOST_TOKENS)]]
    output: list[Annotated[int, msgspec.Meta(le=MOST_TOKENS)]]


def random_tokens(rng: random.Random, n: int, vocab_size: int) -> list[int]:
    """`n` uniform token ids below `vocab_size`."""
    return rng.choices(range(vocab_size), k=n)


def from_lengths(
    lengths: list[tuple[int, int]], vocab_size: int, seed: int | str, prefix_len: int = 0, n_prefixes: int = 1
) -> Dataset:
    """Requests of (own prompt tokens, output tokens); request i starts with prefix i modulo `n_prefixes`."""

    def dataset(repetition: int) -> list[BenchRequest]:
        rng = random.Random(f"{seed}/{repetition}")
        prefixes = [random_tokens(rng, prefix_len, vocab_size) for _ in range(n_prefixes)]
        return [
            BenchRequest(prefixes[i % n_prefixes] + random_tokens(rng, input_len, vocab_size), output_len)
            for i, (input_len, output_len) in enumerate(lengths)
        ]

    return dataset


def uniform_lengths(n: int, input_len: int, output_len: int, range_ratio: float, seed: int) -> list[tuple[int, int]]:
    """`n` pairs, each length uniform in [len·(1 - ratio), len·(1 + ratio)] and at least 1 (vLLM's `random` dataset)."""
    rng = random.Random(f"{seed}/lengths")

    def draw(centre: int) -> int:
        return rng.randint(max(1, int(centre * (1 - range_ratio))), max(1, int(centre * (1 + range_ratio))))

    return [(draw(input_len), draw(output_len)) for _ in range(n)]


def read_lengths(path: str, n: int = 0) -> list[tuple[int, int]]:
    """The first `n` (0: all) length pairs of a lengths file. ConfigError if it cannot be read or has too few."""
    try:
        lengths = msgspec.json.decode(read_regular(path, MAX_LENGTHS_BYTES), type=LengthsFile)
    except OSError as error:
        raise ConfigError(f"lengths file {shown(path)} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"lengths file {shown(path)}: {error}") from None
    pairs = list(zip(lengths.input, lengths.output, strict=False))
    if len(lengths.input) != len(lengths.output) or not pairs or min(map(min, pairs)) < 1:
        raise ConfigError(f"lengths file {shown(path)}: 'input' and 'output' must be equally many lengths above 0")
    if n > len(pairs):
        raise ConfigError(f"lengths file {shown(path)} has {len(pairs)} requests, not {n}: lower --num-prompts")
    return pairs[:n] if n else pairs


def nano_vllm(repetition: int) -> list[BenchRequest]:
    """nano-vllm's `bench.py`: 256 prompts and outputs of 100 to 1024 tokens from `random.seed(0)`.

    142,827 prompt and 133,966 output tokens. Repetition 0 has the very tokens of that script, others fresh ones.
    """
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    output_lens = [rng.randint(100, 1024) for _ in range(256)]
    if repetition != 0:
        fresh = random.Random(f"nano-vllm/{repetition}")
        prompts = [random_tokens(fresh, len(prompt), TOKEN_LIMIT) for prompt in prompts]
    return [BenchRequest(prompt, output_len) for prompt, output_len in zip(prompts, output_lens, strict=True)]
