"""`bench throughput` and `bench latency`: the engine in this process, timed around `LLM.generate`.

Owns repetitions, warm-up and arithmetic. Does not own limits nor profiles (`View`). Invariants: every timed repetition
runs on tokens that no earlier one used; nothing is profiled before all that is timed has been timed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterable, Sequence

from quire.bench.datasets import WARM_UP, BenchRequest, Dataset, from_lengths
from quire.bench.limit import LimitShares, compared
from quire.bench.options import LatencyOptions, ThroughputOptions
from quire.bench.summary import summary
from quire.bench.timeline import Timeline
from quire.bench.view import View
from quire.bench.workloads import LatencyCase
from quire.core.errors import ConfigError, EngineError
from quire.core.outputs import RequestOutput
from quire.core.prompts import TokensPrompt
from quire.core.sampling import SamplingParams
from quire.core.ticker import ticked
from quire.engine.expert_load import Loads, imbalance, since
from quire.engine.llm import LLM
from quire.engine.step_record import StepRecord


@dataclasses.dataclass(slots=True)
class TimedRun:
    """One `generate` call: its outputs, its wall time and its steps."""

    outputs: list[RequestOutput]
    elapsed_s: float
    records: list[StepRecord]

    @property
    def timeline(self) -> Timeline:
        """How the batch filled."""
        return Timeline.of_steps(self.records)

    @property
    def token_ids(self) -> list[list[int]]:
        """Generated ids of each request."""
        return [output.outputs[0].token_ids for output in self.outputs]


def exact_params(requests: Sequence[BenchRequest], temperature: float) -> list[SamplingParams]:
    """Parameters that generate exactly `output_len` tokens and no text."""
    return [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=request.output_len, detokenize=False)
        for request in requests
    ]


def submit(
    llm: LLM, requests: Sequence[BenchRequest], temperature: float, show_bar: bool = False
) -> list[RequestOutput]:
    """All requests at once; returns when the last has ended."""
    prompts = [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in requests]
    return llm.generate(prompts, exact_params(requests, temperature), use_tqdm=show_bar)


def timed_run(llm: LLM, requests: Sequence[BenchRequest], temperature: float, show_bar: bool = False) -> TimedRun:
    """`submit`, timed. EngineError if an output is not as long as asked."""
    records: list[StepRecord] = []
    llm.on_step = records.append
    try:
        begin_s = time.perf_counter()
        outputs = submit(llm, requests, temperature, show_bar)
        elapsed_s = time.perf_counter() - begin_s
    finally:
        llm.on_step = None
    for request, output in zip(requests, outputs, strict=True):
        n = len(output.outputs[0].token_ids)
        if n != request.output_len:
            raise EngineError(f"a request of {request.output_len} output tokens got {n}: nothing was measured")
    return TimedRun(outputs, elapsed_s, records)


def measure_throughput(
    llm: LLM, dataset: Dataset, temperature: float, options: ThroughputOptions, view: View | None = None
) -> tuple[dict[str, object], Timeline]:
    """Warm up, run the repetitions; rates of the median one and of each, and the median's timeline.

    With a view also `limits` and `breakdown` (see there).
    """
    for i in range(options.num_warmups):
        short = [
            BenchRequest(request.prompt_token_ids, min(request.output_len, options.warmup_output_len))
            for request in dataset(WARM_UP - i)
        ]
        timed_run(llm, short, temperature, show_bar=True)
    runs, before = [], llm.expert_loads()
    for repetition in range(options.num_repeats):
        requests = dataset(repetition)
        runs.append(timed_run(llm, requests, temperature, show_bar=True))
    n_input = sum(len(request.prompt_token_ids) for request in requests)
    n_output = sum(request.output_len for request in requests)
    by_time = sorted(runs, key=lambda run: run.elapsed_s)
    middle = by_time[(len(by_time) - 1) // 2]
    results: dict[str, object] = {
        "num_requests": len(requests),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "elapsed_time": middle.elapsed_s,
        "requests_per_second": len(requests) / middle.elapsed_s,
        "output_tokens_per_second": n_output / middle.elapsed_s,
        "tokens_per_second": (n_input + n_output) / middle.elapsed_s,
        "elapsed_times": [run.elapsed_s for run in runs],
    }
    loads = since(before, llm.expert_loads())
    results |= _expert_figures(loads)
    if view is not None:
        view.probe_again()
        limit = n_output / sum(view.limits_s(middle.records, loads))
        name = "output_tokens_per_second"
        results["limits"] = {name: compared(name, limit, n_output / middle.elapsed_s)}
        fresh = functools.partial(submit, llm, dataset(options.num_repeats), temperature)
        results["breakdown"] = view.profile(llm, fresh, len(middle.records), loads)
        results["ceilings"] = view.ceilings()
    return results, middle.timeline


def check_batches(llm: LLM, sizes: Iterable[int], flag: str) -> None:
    """ConfigError for a batch that cannot run together."""
    for size in sizes:
        if size > llm.max_num_seqs:
            raise ConfigError(
                f"{flag} {size:,} is more than the {llm.max_num_seqs:,} sequences that run at once: take fewer, or "
                "raise --max-num-seqs"
            )


def measure_latency(
    llm: LLM, cases: Sequence[LatencyCase], vocab_size: int, options: LatencyOptions, view: View | None = None
) -> tuple[list[dict[str, object]], Timeline]:
    """Each case with warm-up and fresh tokens every iteration; one row of figures a case, and the last timeline.

    With a view, rows have `limits` and `breakdown` as well.
    """
    runs_of, datasets, loads_of = [], [], []
    for case in cases:
        seed = f"{llm.config.seed}/{case}"  # a case must not find its prompts in the cache of the one before
        dataset = from_lengths([(case.input_len, case.output_len)] * case.batch_size, vocab_size, seed)
        passes = [*(WARM_UP - i for i in range(options.num_iters_warmup)), *range(options.num_iters)]
        runs, before = [], llm.expert_loads()
        for i in ticked(passes, f"passes of {case.batch_size} x ({case.input_len} in, {case.output_len} out)"):
            if i == 0:
                before = llm.expert_loads()
            runs.append(timed_run(llm, dataset(i), temperature=0.0))
        runs_of.append(runs[options.num_iters_warmup :])
        loads_of.append(since(before, llm.expert_loads()))
        datasets.append(dataset)
    columns = zip(cases, runs_of, loads_of, strict=True)
    rows = [_latency_row(case, runs) | _expert_figures(loads) for case, runs, loads in columns]
    if view is not None:
        view.probe_again()
        for row, case, runs, loads, dataset in zip(rows, cases, runs_of, loads_of, datasets, strict=True):
            row["limits"] = _latency_limits(view, case, runs, loads)
            fresh = functools.partial(submit, llm, dataset(options.num_iters), 0.0)
            row["breakdown"] = view.profile(llm, fresh, len(runs[-1].records), loads)
    return rows, runs_of[-1][-1].timeline


def _expert_figures(loads: Loads) -> dict[str, object]:
    """How unevenly the experts were chosen; nothing without experts."""
    return {"expert_imbalance": imbalance(loads)} if loads else {}


def _latency_row(case: LatencyCase, runs: Sequence[TimedRun]) -> dict[str, object]:
    """Figures of one case in ms over its iterations: whole batch, first token, token, decode step."""
    metrics = [output.metrics for run in runs for output in run.outputs]
    first_ms, token_ms = [], []
    for times in metrics:
        if times.first_token_s is None or times.finished_s is None:
            raise EngineError("the engine gave no time of a first or last token")
        first_ms.append(1000 * (times.first_token_s - times.arrival_s))
        if case.output_len > 1:
            token_ms.append(1000 * (times.finished_s - times.first_token_s) / (case.output_len - 1))
    step_ms = [1000 * seconds for run in runs for seconds in decode_step_times_s(run.timeline, case.batch_size)]
    return {
        **dataclasses.asdict(case),
        **summary("latency_ms", [1000 * run.elapsed_s for run in runs]),
        **summary("ttft_ms", first_ms),
        **summary("tpot_ms", token_ms),
        "n_decode_steps": len(step_ms),
        "decode_step_ms": statistics.median(step_ms) if step_ms else None,
    }


def _latency_limits(view: View, case: LatencyCase, runs: Sequence[TimedRun], loads: Loads) -> LimitShares:
    """Medians over the iterations: decode step, time until all requests have their first token, whole batch."""
    found: dict[str, list[tuple[float, float]]] = {"decode_step_ms": [], "first_token_ms": [], "latency_ms": []}
    for run in runs:
        limits_s, timeline = view.limits_s(run.records, loads), run.timeline
        steps = decode_steps(timeline, case.batch_size)
        times_s = decode_step_times_s(timeline, case.batch_size)
        found["decode_step_ms"] += zip([limits_s[i] for i in steps], times_s, strict=True)
        times = [output.metrics for output in run.outputs]
        last_first_s = max(one.first_token_s or 0.0 for one in times)
        n_before = sum(record.times.commit_s < last_first_s for record in run.records)
        waited_s = last_first_s - min(one.arrival_s for one in times)
        found["first_token_ms"].append((sum(limits_s[:n_before]), waited_s))
        found["latency_ms"].append((sum(limits_s), run.elapsed_s))
    return {
        name: compared(name, *(1000 * statistics.median(column) for column in zip(*pairs, strict=True)))
        for name, pairs in found.items()
        if pairs
    }


def decode_steps(timeline: Timeline, batch_size: int) -> list[int]:
    """Indices of steps that decode the full batch and prefill nothing, as the step before them does."""
    full = [
        n_tokens == batch_size and n_prefill == 0
        for n_tokens, n_prefill in zip(timeline.n_tokens, timeline.n_prefill_tokens, strict=True)
    ]
    return [i for i in range(1, len(timeline)) if full[i - 1] and full[i]]


def decode_step_times_s(timeline: Timeline, batch_size: int) -> list[float]:
    """Seconds of each of the `decode_steps`, from the commit of the step before it."""
    return [timeline.time_s[i] - timeline.time_s[i - 1] for i in decode_steps(timeline, batch_size)]
