"""`bench throughput` and `bench latency`: the engine in this process, timed around `LLM.generate`.

Owns repetitions, warm-up and arithmetic. Invariant: every timed repetition runs on tokens that no earlier one used.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

from quire.bench.datasets import WARM_UP, BenchRequest, Dataset, from_lengths
from quire.bench.options import LatencyOptions, ThroughputOptions
from quire.bench.summary import summary
from quire.bench.timeline import Timeline, recording
from quire.bench.workloads import LatencyCase
from quire.core.errors import EngineError
from quire.core.outputs import RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM


@dataclasses.dataclass(slots=True)
class TimedRun:
    """One `generate` call: its outputs, its wall time and its steps."""

    outputs: list[RequestOutput]
    elapsed_s: float
    timeline: Timeline

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


def timed_run(llm: LLM, requests: Sequence[BenchRequest], temperature: float, show_bar: bool = False) -> TimedRun:
    """Submit all requests at once and wait for the last. EngineError if an output is not as long as asked."""
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    with recording(llm) as timeline:
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, exact_params(requests, temperature), use_tqdm=show_bar)
        elapsed_s = time.perf_counter() - begin_s
    for request, output in zip(requests, outputs, strict=True):
        n = len(output.outputs[0].token_ids)
        if n != request.output_len:
            raise EngineError(f"a request of {request.output_len} output tokens got {n}: nothing was measured")
    return TimedRun(outputs, elapsed_s, timeline)


def measure_throughput(
    llm: LLM, dataset: Dataset, temperature: float, options: ThroughputOptions
) -> tuple[dict[str, object], Timeline]:
    """Warm up, run the repetitions; rates of the median one and of each, and the median's timeline."""
    for i in range(options.num_warmups):
        short = [
            BenchRequest(request.prompt_token_ids, min(request.output_len, options.warmup_output_len))
            for request in dataset(WARM_UP - i)
        ]
        timed_run(llm, short, temperature)
    runs = []
    for repetition in range(options.num_repeats):
        requests = dataset(repetition)
        runs.append(timed_run(llm, requests, temperature, show_bar=sys.stderr.isatty()))
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
    return results, middle.timeline


def measure_latency(
    llm: LLM, cases: Sequence[LatencyCase], vocab_size: int, options: LatencyOptions
) -> tuple[list[dict[str, object]], Timeline]:
    """Each case with warm-up and fresh tokens every iteration; one row of figures a case, and the last timeline."""
    rows = []
    for case in cases:
        seed = f"{llm.config.seed}/{case}"  # a case must not find its prompts in the cache of the one before
        dataset = from_lengths([(case.input_len, case.output_len)] * case.batch_size, vocab_size, seed)
        for i in range(options.num_iters_warmup):
            timed_run(llm, dataset(WARM_UP - i), temperature=0.0)
        runs = [timed_run(llm, dataset(i), temperature=0.0) for i in range(options.num_iters)]
        rows.append(_latency_row(case, runs))
    return rows, runs[-1].timeline


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


def decode_step_times_s(timeline: Timeline, batch_size: int) -> list[float]:
    """Seconds between neighbouring steps that both decode the full batch and prefill nothing."""
    full = [
        n_tokens == batch_size and n_prefill == 0
        for n_tokens, n_prefill in zip(timeline.n_tokens, timeline.n_prefill_tokens, strict=True)
    ]
    return [
        timeline.time_s[i] - timeline.time_s[i - 1] for i in range(1, len(timeline)) if full[i - 1] and full[i]
    ]  # fmt: skip


