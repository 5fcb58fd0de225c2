"""`bench tradeoffs`: one model in many schemes: quality on held-out texts, tokens a second, bytes of weights.

Owns the list of variants, what is measured of each, and the table. Does not own how folders are made (the caller gives
`Make`) nor the plot (`tradeoff_chart`). Invariants: every variant is an engine as users load it, so its quality counts
rounded activations too; each is alone in memory while it is measured.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from quire.bench.datasets import BenchRequest
from quire.bench.offline import submit
from quire.bench.options import TradeoffOptions
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, LoadError, shown
from quire.core.files import read_regular
from quire.core.prompts import TokensPrompt
from quire.core.sampling import SamplingParams
from quire.core.units import format_bytes
from quire.engine.llm import LLM

MAX_TEXT_BYTES: Final = 1 << 26
WHILE_LOADING: Final = ("none", "int8", "int8-g32", "int4", "int4-g32", "int4-g128")
"""Values of --quantization; the first is what others are compared with."""
MADE: Final = (
    ("int8", "rtn"), ("int8", "gptq"), ("fp8", "rtn"), ("int4", "rtn"), ("int4", "awq"), ("int4", "gptq"),
    ("int4-g32", "rtn"), ("int4-g32", "awq"), ("int4-g32", "gptq"), ("2:4", "magnitude"), ("2:4", "wanda"),
)  # fmt: skip
"""Scheme and method of folders that `quire quantize` writes."""
PROMPT_TOKENS: Final = 32

Make = Callable[[str, str], str]
"""(scheme, method) → folder."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one variant."""

    name: str
    kind: str
    """'while loading', 'made', or 'dense execution': zeros are multiplied by as all else."""
    bits_per_byte: dict[str, float]
    """By name of the text."""
    tokens_per_second: dict[int, float]
    """By number of sequences that are generated at once; the best repetition."""
    weights_bytes: int

    @property
    def mean_bits(self) -> float:
        """Over the texts."""
        return sum(self.bits_per_byte.values()) / len(self.bits_per_byte)


def read_texts(paths: Sequence[str]) -> dict[str, str]:
    """Name of a file without its ending → what stands in it. ConfigError for what cannot be read."""
    found = {}
    for path in paths:
        name = path.rpartition("/")[2].partition(".")[0]
        try:
            found[name] = read_regular(path, MAX_TEXT_BYTES).decode()
        except OSError as error:
            raise ConfigError(f"--texts {shown(path)} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--texts {shown(path)} is not UTF-8: {error}") from None
    if len(found) < len(paths) or not found:
        raise ConfigError("--texts FILE ... is needed: one or more texts, under different names, that tell quality")
    return found


def measure(
    config: EngineConfig, options: TradeoffOptions, texts: Mapping[str, str], make: Make, skipped: dict[str, str]
) -> Iterator[Row]:
    """A row for each variant. skipped: names of those that do not run here, and why."""
    for scheme in WHILE_LOADING:
        own = msgspec.structs.replace(config, quantization=scheme)
        name = scheme if scheme != "none" else "as it is"
        yield from _row(name, "while loading", own, options, texts, skipped)
    for scheme, method in MADE:
        own = msgspec.structs.replace(config, model=make(scheme, method), quantization="auto")
        kind = "dense execution" if scheme == "2:4" else "made"
        yield from _row(f"{scheme} by {method}", kind, own, options, texts, skipped)


def _row(
    name: str, kind: str, config: EngineConfig, options: TradeoffOptions, texts: Mapping[str, str],
    skipped: dict[str, str],
) -> Iterator[Row]:  # fmt: skip
    try:
        llm = LLM(**msgspec.structs.asdict(config))
    except (ConfigError, LoadError) as error:
        skipped[name] = error.message
        return
    try:
        worker: Any = llm.engine.executor.worker  # type: ignore[attr-defined]
        bits = {one: _bits_per_byte(llm, text, options.window) for one, text in texts.items()}
        speeds = {n: _speed(llm, n, options, config.seed) for n in options.batch_sizes}
        yield Row(name, kind, bits, speeds, worker.model.n_bytes)
    finally:
        llm.shutdown()


def _speed(llm: LLM, n: int, options: TradeoffOptions, seed: int) -> float:
    """Tokens a second of n sequences together, prompts left out of neither time nor count of tokens."""
    rng, best_s = random.Random(seed + n), math.inf
    for _ in range(1 + options.num_iters):  # the first warms up
        prompts = [[rng.randrange(llm.logits_width) for _ in range(PROMPT_TOKENS)] for _ in range(n)]
        begin_s = time.perf_counter()
        submit(llm, [BenchRequest(prompt, options.output_len) for prompt in prompts], 0.0)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return n * options.output_len / best_s


def _bits_per_byte(llm: LLM, text: str, window: int) -> float:
    """Of all tokens but the first, in windows that each begin with the last token of the one before."""
    tokenizer = llm.get_tokenizer()
    ids = list(tokenizer.encode(text))
    pieces = [ids[first : first + window] for first in range(0, len(ids) - 1, window - 1)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=piece) for piece in pieces], params, use_tqdm=False)
    nats = 0.0
    for piece, output in zip(pieces, outputs, strict=True):
        rows: Any = output.prompt_logprobs
        nats -= sum(rows[at][token].logprob for at, token in enumerate(piece) if at)
    return nats / math.log(2) / len(text.encode())


def lines(rows: Sequence[Row]) -> list[str]:
    """The table; differences are from the first row."""
    texts, sizes = list(rows[0].bits_per_byte), list(rows[0].tokens_per_second)
    head = [f"{'bits per byte: ' + text if not i else text:>22}" for i, text in enumerate(texts)]
    speeds = [f"{f'tok/s at {n}':>12}" for n in sizes]
    found = [f"{'variant':<24}{''.join(head)}{'mean':>10}{''.join(speeds)}{'weights':>13}"]
    for row in rows:
        bits = "".join(f"{row.bits_per_byte[text]:>22.4f}" for text in texts)
        change = f"{row.mean_bits / rows[0].mean_bits - 1:>+10.2%}"
        speed = "".join(f"{row.tokens_per_second[n]:>12,.0f}" for n in sizes)
        kind = "" if row.kind == "while loading" else f"  {row.kind}"
        found.append(f"{row.name:<24}{bits}{change}{speed}{format_bytes(row.weights_bytes):>13}{kind}")
    return found
