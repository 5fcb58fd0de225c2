"""Simulated requests: when they come, how long they are, and which beginnings they have in common.

A prompt is made when it is needed. Each part of it is one id, repeated: two prompts are alike as long as their parts
are, and a prefix tree, which looks from the first token on, sees no more of them than that. Owns that, and the ways to
make requests up. Does not own files (`trace.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Sequence
from typing import Final

from quire.bench.datasets import read_lengths
from quire.bench.loadgen import arrival_offsets_s
from quire.core.errors import ConfigError

SHAREGPT: Final = ((4.551149501401596, 1.36, 4, 2048), (4.835138367683612, 0.94, 4, 1024))
"""(mu, sigma, least, most) of the logarithm of prompt and output lengths, as those of W3 were drawn."""


@dataclasses.dataclass(slots=True)
class SimRequest:
    """One request of a trace."""

    arrival_s: float
    input_len: int
    output_len: int
    parts: tuple[tuple[int, int], ...] = ()
    """(key, tokens) of its beginning; the rest is its own."""
    token_ids: list[int] | None = None
    """Of the whole prompt, where the trace has them."""

    def prompt(self, number: int) -> list[int]:
        """Its ids; number: of the request, for those that are its own."""
        if self.token_ids is not None:
            return list(self.token_ids)
        tokens: list[int] = []
        for key, n in self.parts:
            tokens += [2 * key + 1] * min(n, self.input_len - len(tokens))
        tokens += [2 * number + 2] * (self.input_len - len(tokens))
        return tokens


def at_times(requests: Sequence[SimRequest], times_s: Sequence[float]) -> list[SimRequest]:
    """The same requests at other times."""
    return [dataclasses.replace(one, arrival_s=at) for one, at in zip(requests, times_s, strict=True)]


def at_rate(requests: Sequence[SimRequest], rate: float, burstiness: float, seed: int) -> list[SimRequest]:
    """The same requests at random gaps; inf: all at once."""
    return at_times(requests, arrival_offsets_s(len(requests), rate, burstiness, seed))


def rate_of(requests: Sequence[SimRequest]) -> float:
    """Requests a second; inf: all at once."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    return (len(requests) - 1) / span_s if span_s > 0 else math.inf


def stretched(requests: Sequence[SimRequest], rate: float) -> list[SimRequest]:
    """A recorded trace with its gaps shortened or widened to another mean rate."""
    before = rate_of(requests)
    if math.isinf(rate) or math.isinf(before):
        return at_times(requests, [0.0] * len(requests)) if math.isinf(rate) else at_rate(requests, rate, 1.0, 0)
    first_s = requests[0].arrival_s
    return at_times(requests, [(one.arrival_s - first_s) * before / rate for one in requests])


def of_lengths(lengths: Sequence[tuple[int, int]], prefix_len: int = 0, n_prefixes: int = 1) -> list[SimRequest]:
    """Requests of (own prompt tokens, output tokens), all at once; request i starts with prefix i modulo the number."""
    return [
        SimRequest(0.0, prefix_len + n_in, n_out, ((i % n_prefixes, prefix_len),) if prefix_len else ())
        for i, (n_in, n_out) in enumerate(lengths)
    ]


def sharegpt_lengths(n: int, seed: int) -> list[tuple[int, int]]:
    """Lengths like those of people's chats: lognormal, cut at both ends, as W3's."""
    rng = random.Random(f"{seed}/sharegpt")

    def draw(mu: float, sigma: float, least: int, most: int) -> int:
        return min(max(round(rng.lognormvariate(mu, sigma)), least), most)

    return [(draw(*SHAREGPT[0]), draw(*SHAREGPT[1])) for _ in range(n)]


@functools.cache
def nano_vllm_lengths() -> tuple[tuple[int, int], ...]:
    """Those of W1 and W2 (`datasets.nano_vllm`)."""
    rng = random.Random(0)
    inputs = []
    for _ in range(256):
        inputs.append(rng.randint(100, 1024))
        for _ in range(inputs[-1]):
            rng.randint(0, 10000)
    return tuple(zip(inputs, [rng.randint(100, 1024) for _ in range(256)], strict=True))


def workload_requests(name: str, dataset_path: str) -> list[SimRequest]:
    """The requests of W1, W2, W3 or W5, by lengths. ConfigError if W3 lacks its file."""
    if name in ("W1", "W2"):
        return of_lengths(nano_vllm_lengths())
    if name == "W5":
        return of_lengths([(64, 64)] * 512, prefix_len=2048)
    if not dataset_path:
        raise ConfigError("workload W3 takes its lengths from a JSON file of 'input' and 'output': give --dataset-path")
    return of_lengths(read_lengths(dataset_path, 1000))


def repeated(requests: Sequence[SimRequest], n: int) -> list[SimRequest]:
    """`n` requests, the given ones in turns: what is their own is not the same again."""
    return list(itertools.islice(itertools.cycle(requests), n))
