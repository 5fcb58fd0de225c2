"""`bench replay`: traffic that a server recorded (`quire serve --record FILE`), again, with its timing.

Owns reading the file and making prompts. Does not own sending (`client.py`, `loadgen.py`).
Invariant: prompts that were recorded without content have the recorded lengths and equal beginnings where the recorded
ones had, so that a prefix cache sees the same.
"""

from __future__ import annotations

import os
import random

import msgspec

from quire.bench.client import CompletionsClient, check_base_url, first_model, open_session
from quire.bench.datasets import BenchRequest
from quire.bench.explained import explained
from quire.bench.loadgen import counted, run_load
from quire.bench.options import ReplayOptions
from quire.bench.serving import ServingRun
from quire.core import env
from quire.core.errors import ConfigError
from quire.core.files import open_regular

MARK_TOKENS = 32
FIRST_TOKEN = 10
"""Lower ids are often special tokens."""


class _Prompt(msgspec.Struct):
    length: int
    marks: list[int] = []
    token_ids: list[int] | None = None


class _Line(msgspec.Struct):
    """What is read of a line; the rest is for people."""

    at_s: float
    prompts: list[_Prompt]
    n: int
    n_output: int


def read_record(path: str, vocab_size: int, max_requests: int = 0) -> tuple[list[BenchRequest], list[float]]:
    """(requests, seconds since the first), in order of arrival; one for each prompt and sample of a recorded request.

    Those without output are left out. ConfigError for a file that is no record.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            lines = [msgspec.json.decode(line, type=_Line) for line in file]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not what `quire serve --record` writes: {error}") from None
    lines = sorted((line for line in lines if line.n_output), key=lambda line: line.at_s)
    requests, offsets_s = [], []
    for number, line in enumerate(lines):
        n_parts = len(line.prompts) * line.n
        for prompt in line.prompts:
            token_ids = _tokens(prompt, vocab_size, number)
            requests += [BenchRequest(token_ids, max(1, round(line.n_output / n_parts)))] * line.n
        offsets_s += [line.at_s - lines[0].at_s] * n_parts
    if not requests:
        raise ConfigError(f"{path} holds no request that brought output")
    return requests[: max_requests or None], offsets_s[: max_requests or None]


def _tokens(prompt: _Prompt, vocab_size: int, number: int) -> list[int]:
    if prompt.token_ids is not None:
        return prompt.token_ids
    tokens: list[int] = []
    for mark in prompt.marks:
        tokens += random.Random(mark).choices(range(FIRST_TOKEN, vocab_size), k=MARK_TOKENS)
    rest = max(1, prompt.length) - len(tokens)
    return tokens + random.Random(f"{number}/rest").choices(range(FIRST_TOKEN, vocab_size), k=rest)


async def replay(path: str, options: ReplayOptions) -> ServingRun:
    """Send every request at its time, divided by `speed`. EngineError if there is no server."""
    base_url = check_base_url(options.base_url)
    requests, offsets_s = read_record(path, options.vocab_size, options.max_requests)
    async with open_session(options.api_key or env.read("QUIRE_API_KEY")) as session:
        served = await first_model(session, base_url, options.ready_check_timeout_sec)
        fields: dict[str, object] = {"temperature": options.temperature, "ignore_eos": True}
        client = CompletionsClient(session, f"{base_url}/v1/completions", options.model or served, fields)
        with counted(len(requests)) as on_done:
            due_s = [offset_s / options.speed for offset_s in offsets_s]
            traces, duration_s = await run_load(requests, client.complete, due_s, on_done=on_done)
        return ServingRun(traces, duration_s, client.model, await explained(session, base_url, traces))
