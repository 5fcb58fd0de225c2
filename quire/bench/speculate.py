"""`bench speculate`: the same requests with drafts and without, in turns, in this process.

Owns the pairs and the arithmetic. Does not own what drafts cost (`planner/drafts.py`) nor the chart (`draft_chart.py`).
Invariants: both engines read the same prompts; a row says whether every token was the same, unless it was forced.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.bench.datasets import BenchRequest
from quire.bench.draft_reason import spread_of
from quire.bench.offline import check_batches, exact_params
from quire.bench.options import SpeculateOptions
from quire.config.engine import EngineConfig
from quire.config.mesh import mesh_of
from quire.core.errors import ConfigError, shown
from quire.core.prompts import TokensPrompt
from quire.core.ticker import ticked
from quire.engine.llm import LLM
from quire.kernels.invariance import RowsAlone
from quire.planner.drafts import DraftCosts, expected_tokens


class FullDrafter:
    """As many guesses as there is room for, of any token, after the time of the drafter that it stands for."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """See `Drafter`."""
        self._drafter.open(slot, salt, prompt_len)

    def close(self, slot: int, tokens: Any) -> None:
        """See `Drafter`."""
        self._drafter.close(slot, tokens)

    def guess(self, contexts: Sequence[Any]) -> list[list[int]]:
        """See `Drafter`."""
        guesses: list[list[int]] = self._drafter.guess(contexts)
        return [(guess + [0] * context.most)[: context.most] for guess, context in zip(guesses, contexts, strict=True)]


@dataclasses.dataclass(slots=True)
class Pair:
    """Two engines of one model, of which one drafts."""

    plain: LLM
    drafting: LLM

    @classmethod
    def load(cls, config: EngineConfig, acceptance: float) -> Pair:
        """Both loaded; ConfigError where nothing is to be drafted."""
        if not config.speculative_config:
            raise ConfigError('nothing is drafted: add --speculative-config, for instance \'{"method": "ngram"}\'')
        n_ranks = mesh_of(config).n_ranks
        if n_ranks > 1:
            raise ConfigError(
                f"drafts are compared on one rank, and {n_ranks} are asked for: leave these options out, or run"
                " `quire bench throughput` with and without --speculative-config"
            )
        options = msgspec.structs.asdict(config)
        half = {"gpu_memory_utilization": config.gpu_memory_utilization / 2}  # what the first takes counts for both
        pair = cls(LLM(**options | {"speculative_config": None} | half), LLM(**options))
        if acceptance >= 0:
            worker: Any = pair.drafting.engine.executor.worker  # type: ignore[attr-defined]
            drafter = worker.drafter if worker.guesses_all else FullDrafter(worker.drafter)
            worker.replace_drafter(drafter, acceptance)
        return pair

    def shutdown(self) -> None:
        """Both."""
        self.plain.shutdown()
        self.drafting.shutdown()


def measure_speculation(
    config: EngineConfig, options: SpeculateOptions
) -> tuple[list[dict[str, object]], DraftCosts | None]:
    """A row for each batch size: rates, acceptance and what they let expect; and what a step and a guess cost."""
    text = _text(options.text) if options.text else ""
    pair = Pair.load(config, options.acceptance)
    try:
        check_batches(pair.plain, options.batch_sizes, "--batch-sizes")
        texts = _prompts(pair.plain, options, text) if options.text else []
        rows = []
        for n in options.batch_sizes:
            rng = random.Random(config.seed + n)
            rows.append(compare(pair, options, n, functools.partial(_requests, pair.plain, options, n, texts, rng)))
        return rows, pair.drafting.engine.scheduler.live.drafts.costs
    finally:
        pair.shutdown()


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"--text {shown(path)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {shown(path)} is not UTF-8: {error}") from None


def _prompts(llm: LLM, options: SpeculateOptions, text: str) -> list[int]:
    """The tokens of `--text`, of which prompts are cut."""
    tokens = list(llm.get_tokenizer().encode(text))
    if len(tokens) < options.input_len:
        raise ConfigError(f"--text {options.text!r} has {len(tokens)} tokens, --input-len is {options.input_len}")
    return tokens


def _requests(llm: LLM, options: SpeculateOptions, n: int, tokens: list[int], rng: random.Random) -> list[BenchRequest]:
    """`n` prompts that nobody has read before, or pieces of the text."""
    if tokens:
        last = len(tokens) - options.input_len
        starts = [rng.randint(0, last) for _ in range(n)]
        return [BenchRequest(tokens[at : at + options.input_len], options.output_len) for at in starts]
    most = min(options.vocab_size, llm.logits_width)
    return [BenchRequest([rng.randrange(most) for _ in range(options.input_len)], options.output_len) for _ in range(n)]


def compare(pair: Pair, options: SpeculateOptions, n: int, draw: Callable[[], list[BenchRequest]]) -> dict[str, object]:
    """A row: `n` requests with drafts and without, in turns. draw: those of the next turn, output_len tokens each.

    Three ratios of plain to drafting: of medians; of the fastest runs, which other work on the machine disturbed least;
    of the processor time of medians, which counts what another core hides in plain steps.
    """
    wall_s = {"plain": list[float](), "drafting": list[float]()}
    cpu_s = {"plain": list[float](), "drafting": list[float]()}
    is_same, before = True, pair.drafting.stats()
    passes = range(-options.num_iters_warmup, options.num_iters)
    for iteration in ticked(passes, f"pairs of passes of {n} requests"):
        requests = draw()
        outputs = {}
        turns = [("plain", pair.plain), ("drafting", pair.drafting)]
        for name, llm in turns if iteration % 2 else reversed(turns):
            llm.reset_prefix_cache()
            took_s, used_s, outputs[name] = _outputs(llm, requests, options.temperature)
            if iteration >= 0:
                wall_s[name].append(took_s)
                cpu_s[name].append(used_s)
        is_same &= outputs["plain"] == outputs["drafting"]
        if iteration == -1:
            before = pair.drafting.stats()
    after = pair.drafting.stats()
    plain_s, drafting_s = (statistics.median(wall_s[name]) for name in ("plain", "drafting"))
    n_tokens = n * options.output_len
    n_steps, n_spans = after.steps - before.steps, after.n_drafts - before.n_drafts
    n_drafted, n_right = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    mean_drafts, mean_right = n_drafted / max(1, n_spans), n_right / max(1, n_spans)
    return {
        "batch_size": n,
        "plain_tokens_per_second": n_tokens / plain_s,
        "drafting_tokens_per_second": n_tokens / drafting_s,
        "speedup": plain_s / drafting_s,
        "speedup_spread": spread_of(wall_s["plain"], wall_s["drafting"]),
        "speedup_of_fastest": min(wall_s["plain"]) / min(wall_s["drafting"]),
        "speedup_of_processor_time": statistics.median(cpu_s["plain"]) / statistics.median(cpu_s["drafting"]),
        "same_tokens": _same(is_same, pair, options),
        "tokens_per_step": n * (options.output_len - 1) * options.num_iters / max(1, n_steps),
        "drafts_per_span": mean_drafts,
        "accepted_per_span": mean_right,
        "acceptance": acceptance_of(mean_right, mean_drafts),
        "drafting_spans": n_spans,
        "plain_times_s": wall_s["plain"],
        "drafting_times_s": wall_s["drafting"],
        "plain_processor_s": cpu_s["plain"],
        "drafting_processor_s": cpu_s["drafting"],
    }


def _same(is_same: bool, pair: Pair, options: SpeculateOptions) -> bool | str:
    """Or why they need not be."""
    worker: Any = pair.drafting.engine.executor.worker  # type: ignore[attr-defined]
    if options.acceptance >= 0:
        return "acceptance is forced"
    if not is_same and worker.rows_alone is RowsAlone.ASKED:
        return "no: the fastest kernels depend on the batch"
    return is_same or (f"no: {worker.no_determinism}" if worker.no_determinism else False)


def _outputs(llm: LLM, requests: Sequence[BenchRequest], temperature: float) -> tuple[float, float, list[list[int]]]:
    """Seconds, of which the processor's, and tokens; each request has its own seed, the same in both engines."""
    prompts = [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in requests]
    params = [msgspec.structs.replace(one, seed=seed) for seed, one in enumerate(exact_params(requests, temperature))]
    begin_s, used_s = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took_s, used_s = time.perf_counter() - begin_s, time.process_time() - used_s
    return took_s, used_s, [one.outputs[0].token_ids for one in outputs]


def acceptance_of(mean_right: float, mean_drafts: float) -> float:
    """The chance α with which drafts that are right independently give so many right ones of so many, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if _mean_right(middle, mean_drafts) < mean_right:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _mean_right(rate: float, n_drafts: float) -> float:
    """Right drafts on average, between the whole numbers on a line."""
    whole = int(n_drafts)
    low, high = expected_tokens(rate, whole) - 1, expected_tokens(rate, whole + 1) - 1
    return low + (high - low) * (n_drafts - whole)
