"""Schedulers of the past on a real device: the same model, kernels and requests, in turns.

    python -m benchmarks.baselines                        # the demo model on a CPU
    python -m benchmarks.baselines --device cuda          # Llama 3.2 1B's shape on a GPU

All requests wait from the start. Static batches are groups that are answered before the next one begins (kinder than
the original: nothing is padded, and who has ended is computed no more); dynamic batches are as large as preferred, half
as many, as none has to wait for a delay. Reserved is Orca's: of the same pages each sequence has as many as the longest
context takes, so fewer run. Whole prompts are steps without a bound on prompt tokens. The same policies over a cost
model, with arrivals: `quire simulate --baselines`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Final

from quire import LLM
from quire.bench.datasets import BenchRequest, from_lengths
from quire.bench.offline import TimedRun, timed_run
from quire.bench.report import build_report, write_report
from quire.bench.shape import PREFIX, shape_options
from quire.bench.summary import percentile

RESULTS = pathlib.Path(__file__).with_name("results")
PREFIX_LEN, N_PREFIXES = 128, 4
MAX_LEN, PAGE = 512, 16
CHUNK_ROWS = 4
"""Rows of a chunked step, for each sequence that may run."""
WARM_BATCHES = 2
"""Batches of requests that a policy has answered before it is timed: kernels are compiled for its counts of rows."""
LINE = 300
"""Points of a line over time, at most."""
POOL_SHARE = 0.75
"""Tokens in pages, of the longest contexts of all sequences: what they hold in the mean, and somewhat more."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Of a kind of device."""

    model: str
    requests: int
    batch: int
    output: pathlib.Path


DEFAULTS: Final = {
    "cpu": Defaults("demo", 96, 16, RESULTS / "baselines_cpu.json"),
    "cuda": Defaults("shape:llama-3.2-1b", 768, 128, RESULTS / "h200" / "baselines.json"),
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """A way to serve the requests; options: of the engine."""

    name: str
    options: tuple[tuple[str, int], ...]
    group: int = 0
    """Requests that are answered before the next ones begin; 0: all of them together."""


def policies(batch: int) -> list[Policy]:
    """batch: most sequences at once."""
    whole = {"enable_prefix_caching": False, "max_num_batched_tokens": 8192, "max_num_seqs": batch}
    reserved, chunk = int(POOL_SHARE * batch), CHUNK_ROWS * batch

    def policy(name: str, group: int = 0, **options: int) -> Policy:
        return Policy(name, tuple((whole | options).items()), group)

    return [
        policy(f"static {batch}", batch),
        policy(f"dynamic, {batch // 2} preferred", batch // 2),
        policy(f"reserved, {reserved} fit", max_num_seqs=reserved),
        policy("continuous, whole prompts"),
        policy(f"continuous, {chunk} tokens a step", max_num_batched_tokens=chunk),
        policy("continuous and tree", enable_prefix_caching=True),
    ]


def make_requests(n: int, repetition: int) -> list[BenchRequest]:
    """A prefix of 128 tokens of four, 16 to 128 own tokens, 8 to 192 out."""
    rng = random.Random(0)
    lengths = [(rng.randint(16, 128), rng.randint(8, 192)) for _ in range(n)]
    return from_lengths(lengths, 1000, "baselines", PREFIX_LEN, N_PREFIXES)(repetition)


def run(llm: LLM, policy: Policy, requests: Sequence[BenchRequest]) -> list[TimedRun]:
    """Its groups, one after the other."""
    size = policy.group or len(requests)
    return [timed_run(llm, requests[at : at + size], 0.0) for at in range(0, len(requests), size)]


def gaps_ms(runs: Sequence[TimedRun]) -> list[float]:
    """Between steps that bring tokens to decoding sequences: what these wait for their next token."""
    times = [[record.time_s for record in one.records if record.n_tokens > record.n_prefill_tokens] for one in runs]
    return [1000 * (b - a) for one in times for a, b in itertools.pairwise(one)]


def load(model: str, device: str, options: dict[str, int], batch: int) -> LLM:
    """All engines have as many pages."""
    shape = shape_options(model) if model.startswith(PREFIX) else {"model": model}
    n_pages = 1 + int(POOL_SHARE * batch * MAX_LEN) // PAGE
    return LLM(
        **shape, **options, device=device, dtype="bfloat16", max_model_len=MAX_LEN, block_size=PAGE,
        num_gpu_blocks_override=n_pages,
    )  # fmt: skip


def line_of(parts: Sequence[TimedRun]) -> dict[str, list[float]]:
    """Seconds since the first step ended, and sequences that ran, of at most `LINE` steps; groups follow each other."""
    records = [record for part in parts for record in part.records]
    records = records[:: -(-len(records) // LINE)]
    begin_s = records[0].time_s
    return {
        "time_s": [round(one.time_s - begin_s, 4) for one in records], "n_running": [one.n_running for one in records],
    }  # fmt: skip


def row_of(name: str, runs: Sequence[Sequence[TimedRun]], n_tokens: int) -> dict[str, object]:
    """Figures of a policy over its repetitions."""
    seconds = [sum(part.elapsed_s for part in parts) for parts in runs]
    gaps = [gap for parts in runs for gap in gaps_ms(parts)]
    running = [record.n_running for parts in runs for part in parts for record in part.records]
    return {
        "policy": name, "output_tokens_per_second": n_tokens / min(seconds), "p99_gap_ms": percentile(gaps, 99),
        "max_gap_ms": max(gaps), "mean_running": sum(running) / len(running), "elapsed_times": seconds,
        "line": line_of(runs[seconds.index(min(seconds))]),
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEFAULTS, default="cpu")
    parser.add_argument("--model", help="demo, a folder, or shape:<name> for random weights")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--batch", type=int, help="most sequences at once, for all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args(argv)
    for name, value in vars(DEFAULTS[args.device]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    engines: dict[tuple[tuple[str, int], ...], LLM] = {}
    measure: dict[str, Callable[[int], list[TimedRun]]] = {}
    for policy in policies(args.batch):
        if policy.options not in engines:
            engines[policy.options] = load(args.model, args.device, dict(policy.options), args.batch)
        llm = engines[policy.options]
        run(llm, policy, make_requests(WARM_BATCHES * args.batch, -1))
        measure[policy.name] = lambda i, llm=llm, policy=policy: run(llm, policy, make_requests(args.requests, i))
    found: dict[str, list[list[TimedRun]]] = {name: [] for name in measure}
    for repetition in range(args.repeats):
        for name, one in measure.items():
            found[name].append(one(repetition))
    n_tokens = sum(one.output_len for one in make_requests(args.requests, 0))
    rows = [row_of(name, runs, n_tokens) for name, runs in found.items()]
    for row in rows:
        print(
            f"{row['policy']:<32}{row['output_tokens_per_second']:10,.0f} tokens/s, p99 gap {row['p99_gap_ms']:6.2f}"
            f" ms, {row['mean_running']:5.1f} at once"
        )
    for llm in engines.values():
        llm.shutdown()
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    report = build_report(f"baselines on {args.device}", settings, {"rows": rows}, argv=[*parser.prog.split(), *argv])
    write_report(str(args.output), report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
