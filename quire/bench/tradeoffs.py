"""`bench tradeoffs`: one model in many variants: quality on texts and tasks, speed beside the model as it is, bytes.

Owns the list of variants, what is measured of each, and the table. Does not own how folders are made (the caller gives
`Make`) nor the plot (`tradeoff_chart`). Invariants: every variant is an engine as users load it, so its quality counts
rounded activations too; while it is timed, the model as it is stands beside it and takes every other turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from quire.bench.datasets import BenchRequest
from quire.bench.offline import check_batches, submit
from quire.bench.options import TradeoffOptions
from quire.bench.tasks import Score, Task, answer_tasks
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, LoadError, RequestError, shown
from quire.core.files import read_regular
from quire.core.prompts import TokensPrompt
from quire.core.sampling import SamplingParams
from quire.core.ticker import ticking
from quire.core.units import format_bytes
from quire.engine.early_exit import leave_early
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
TOKEN_BYTES: Final = 8
"""More than a token has on average."""
EXIT_ROWS: Final = 256
"""Of a step with early exit, which keeps logits of all."""

Make = Callable[[str, str], str]
"""(scheme, method) → folder."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What is to be measured."""

    name: str
    kind: str
    """'while loading', 'made', 'another model', 'early exit', or 'dense execution': zeros are multiplied by as all
    else."""
    config: EngineConfig
    exit: tuple[int, float] | None = None
    """The layer after which tokens may leave, and the probability from which on they do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one variant."""

    name: str
    kind: str
    """See `Variant`."""
    bits_per_byte: dict[str, float]
    """By name of the text."""
    tasks: dict[str, Score]
    """By kind of task; empty without a file of them."""
    tokens_per_second: dict[int, float]
    """By number of sequences that are generated at once; the best repetition."""
    speed: dict[int, float]
    """Likewise: the time of the model as it is by this one's, the median of their turns."""
    weights_bytes: int
    layers: float
    """Before a token is chosen, on average over those that were timed."""

    @property
    def mean_bits(self) -> float:
        """Over the texts."""
        return sum(self.bits_per_byte.values()) / len(self.bits_per_byte)

    @property
    def accuracy(self) -> float:
        """Share of the tasks with right replies; NaN without tasks."""
        asked = sum(score[1] for score in self.tasks.values())
        return sum(score[0] for score in self.tasks.values()) / asked if asked else math.nan


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
        if not found[name]:
            raise ConfigError(f"--texts {shown(path)} is empty: give a text that tells quality")
    if len(found) < len(paths) or not found:
        raise ConfigError("--texts FILE ... is needed: one or more texts, under different names, that tell quality")
    return found


def variants(config: EngineConfig, options: TradeoffOptions, n_layers: int, make: Make) -> Iterator[Variant]:
    """All; the first is the model as it is, with which the others are compared. n_layers: it has."""
    replace = msgspec.structs.replace
    for scheme in WHILE_LOADING:
        name = scheme if scheme != "none" else "as it is"
        yield Variant(name, "while loading", replace(config, quantization=scheme))
    for scheme, method in MADE:
        kind = "dense execution" if scheme == "2:4" else "made"
        own = replace(config, model=make(scheme, method), quantization="auto")
        yield Variant(f"{scheme} by {method}", kind, own)
    n_seqs = max(options.batch_sizes)
    alone = replace(
        config, quantization="none", enable_prefix_caching=False, max_num_seqs=n_seqs,
        max_num_batched_tokens=max(EXIT_ROWS, n_seqs),
    )  # fmt: skip
    layers = options.exit_layers or sorted({max(1, n_layers // 2), max(1, 3 * n_layers // 4)})
    for layer, threshold in itertools.product(layers, options.exit_thresholds):
        yield Variant(f"exit after {layer} at {threshold:g}", "early exit", alone, (layer, threshold))
    for path in options.models:
        name = path.rstrip("/").rpartition("/")[2]
        yield Variant(name, "another model", replace(config, model=path, quantization="none"))


def measure(
    config: EngineConfig,
    options: TradeoffOptions,
    texts: Mapping[str, str],
    tasks: Sequence[Task],
    make: Make,
    skipped: dict[str, str],
) -> Iterator[Row]:
    """A row for each variant. skipped: names of those that do not run, and why. ConfigError for batches too large."""
    base = LLM(**msgspec.structs.asdict(msgspec.structs.replace(config, quantization=WHILE_LOADING[0])))
    try:
        check_batches(base, options.batch_sizes, "--batch-sizes")
        turns = Turns(base, options, texts, config.seed)
        for variant in variants(config, options, len(_worker(base).model.layers), make):
            is_base = variant.name == "as it is"
            try:
                llm = base if is_base else LLM(**msgspec.structs.asdict(variant.config))
            except (ConfigError, LoadError) as error:
                skipped[variant.name] = error.message
                continue
            try:
                with ticking(f"measuring {variant.name}"):
                    row = _row(variant, llm, turns, texts, tasks)
                yield row
            except (ConfigError, RequestError) as error:
                if is_base:
                    raise
                skipped[variant.name] = error.message
            finally:
                if not is_base:
                    llm.shutdown()
    finally:
        base.shutdown()


def _row(variant: Variant, llm: LLM, turns: Turns, texts: Mapping[str, str], tasks: Sequence[Task]) -> Row:
    options, worker = turns.options, _worker(llm)
    leaving = None if variant.exit is None else leave_early(worker, variant.config, *variant.exit)
    bits = {one: bits_per_byte(llm, text, options.window) for one, text in texts.items()}
    scores = answer_tasks(llm, tasks, options.task_output_len) if tasks else {}
    if leaving is not None:
        leaving.n_tokens = leaving.n_exits = 0
    timed = {n: turns.take(llm, n) for n in options.batch_sizes}
    layers = float(len(worker.model.layers))
    if leaving is not None and variant.exit is not None:
        layers -= (layers - variant.exit[0]) * leaving.n_exits / max(1, leaving.n_tokens)
    tokens_per_second = {n: n * options.output_len / own_s for n, (own_s, _) in timed.items()}
    speed = {n: ratio for n, (_, ratio) in timed.items()}
    return Row(variant.name, variant.kind, bits, scores, tokens_per_second, speed, worker.model.n_bytes, layers)


def _worker(llm: LLM) -> Any:
    return llm.engine.executor.worker  # type: ignore[attr-defined]


class Turns:
    """Times a variant and the model as it is one after the other. Prompts are pieces of the texts: how many tokens
    leave early depends on what is said."""

    def __init__(self, base: LLM, options: TradeoffOptions, texts: Mapping[str, str], seed: int) -> None:
        self.options, self._base, self._rng = options, base, random.Random(seed)
        self._text = "".join(texts.values())

    def take(self, llm: LLM, n: int) -> tuple[float, float]:
        """Of n sequences together, prompts counted in the time: the best seconds of `llm`, and the median of its
        speed beside the model as it is, which is 1 for that one."""
        own_s, ratios = math.inf, []
        for turn in range(1 + self.options.num_iters):  # the first warms up
            pieces = [self._piece() for _ in range(n)]
            both = dict.fromkeys([self._base, llm] if turn % 2 else [llm, self._base])  # it may be that one
            took_s = {id(one): self._seconds(one, pieces) for one in both}
            if turn:
                own_s = min(own_s, took_s[id(llm)])
                ratios.append(took_s[id(self._base)] / took_s[id(llm)])
        return own_s, statistics.median(ratios)

    def _piece(self) -> str:
        """Some text of about PROMPT_TOKENS tokens or more."""
        length = PROMPT_TOKENS * TOKEN_BYTES
        first = self._rng.randrange(max(1, len(self._text) - length))
        return self._text[first : first + length]

    def _seconds(self, llm: LLM, pieces: Sequence[str]) -> float:
        prompts = [llm.get_tokenizer().encode(piece)[:PROMPT_TOKENS] for piece in pieces]
        begin_s = time.perf_counter()
        submit(llm, [BenchRequest(prompt, self.options.output_len) for prompt in prompts], 0.0)
        return time.perf_counter() - begin_s


def bits_per_byte(llm: LLM, text: str, window: int) -> float:
    """Bits that all tokens of a text but the first are worth to a model, by the bytes of that text in UTF-8.

    text: not empty; of one token it gives 0. window: tokens that are read together, 2 or more; each window begins with
    the last token of the one before. Raises ContextLengthExceeded where the context cannot hold a window.
    """
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
    """The table; differences and speeds are to the first row."""
    texts, sizes = list(rows[0].bits_per_byte), list(rows[0].speed)
    head = "".join(f"{text:>10}" for text in texts)
    speeds = "".join(f"{f'speed at {n}':>14}" for n in sizes)
    rates = "".join(f"{f'tok/s at {n}':>14}" for n in sizes)
    found = [f"{'bits per byte of':<24}{head}{'mean':>10}{'tasks':>9}{speeds}{rates}{'layers':>9}{'weights':>13}"]
    for row in rows:
        bits = "".join(f"{row.bits_per_byte[text]:>10.4f}" for text in texts)
        change = f"{row.mean_bits / rows[0].mean_bits - 1:>+10.2%}"
        tasks = f"{row.accuracy:>9.1%}" if row.tasks else f"{'-':>9}"
        speed = "".join(f"{f'{row.speed[n]:.2f} x':>14}" for n in sizes)
        rate = "".join(f"{row.tokens_per_second[n]:>14,.0f}" for n in sizes)
        kind = "" if row.kind == "while loading" else f"  {row.kind}"
        size = f"{row.layers:>9.2f}{format_bytes(row.weights_bytes):>13}"
        found.append(f"{row.name:<24}{bits}{change}{tasks}{speed}{rate}{size}{kind}")
    return found
