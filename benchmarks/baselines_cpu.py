"""Schedulers of the past on a real device: the same model, kernels and requests on this CPU, in turns.

    python -m benchmarks.baselines_cpu [--model demo] [--repeats 3]

Static batches are groups that are answered before the next one begins (kinder than the original: nothing is padded, and
who has ended is computed no more); whole prompts are steps without a bound on prompt tokens. The same policies over a
cost model: `quire simulate --baselines`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import random
import sys
from collections.abc import Callable, Sequence

from quire import LLM
from quire.bench.datasets import BenchRequest, from_lengths
from quire.bench.offline import TimedRun, timed_run
from quire.bench.report import build_report, write_report
from quire.bench.shape import PREFIX, shape_options
from quire.bench.summary import percentile

RESULTS = pathlib.Path(__file__).with_name("results")
PREFIX_LEN, N_PREFIXES = 128, 4
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Policy:
    """A way to serve the requests; options: of the engine."""

    name: str
    options: dict[str, object]
    group: int = 0
    """Requests that are answered before the next ones begin; 0: all of them together."""


def policies(batch: int) -> list[Policy]:
    whole: dict[str, object] = {"enable_prefix_caching": False, "max_num_batched_tokens": 8192}
    return [
        Policy(f"static {batch}", whole, batch),
        Policy("continuous, whole prompts", whole),
        Policy(f"continuous, {CHUNK} tokens a step", {**whole, "max_num_batched_tokens": CHUNK}),
        Policy("continuous and tree", {"enable_prefix_caching": True, "max_num_batched_tokens": 8192}),
    ]


def make_requests(n: int, repetition: int) -> list[BenchRequest]:
    """A prefix of 128 tokens of four, 16 to 128 own tokens, 8 to 192 out."""
    rng = random.Random(0)
    lengths = [(rng.randint(16, 128), rng.randint(8, 192)) for _ in range(n)]
    return from_lengths(lengths, 1000, "baselines", PREFIX_LEN, N_PREFIXES)(repetition)


def run(llm: LLM, policy: Policy, requests: Sequence[BenchRequest]) -> list[TimedRun]:
    size = policy.group or len(requests)
    return [timed_run(llm, requests[at : at + size], 0.0) for at in range(0, len(requests), size)]


def gaps_ms(runs: Sequence[TimedRun]) -> list[float]:
    """Between steps that bring tokens to decoding sequences: what these wait for their next token."""
    times = [[record.time_s for record in one.records if record.n_tokens > record.n_prefill_tokens] for one in runs]
    return [1000 * (b - a) for one in times for a, b in itertools.pairwise(one)]


def load(model: str, policy: Policy, batch: int) -> LLM:
    options = shape_options(model) if model.startswith(PREFIX) else {"model": model}
    return LLM(**options, **policy.options, device="cpu", dtype="bfloat16", max_model_len=512, max_num_seqs=batch)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines_cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, a folder, or shape:<name> for random weights")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16, help="most sequences at once, for all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", default=str(RESULTS / "baselines_cpu.json"))
    args = parser.parse_args(argv)
    engines: list[LLM] = []
    measure: dict[str, Callable[[int], list[TimedRun]]] = {}
    found: dict[str, list[list[TimedRun]]] = {}
    for policy in policies(args.batch):
        llm = load(args.model, policy, args.batch)
        run(llm, policy, make_requests(args.batch, -1))
        measure[policy.name] = lambda i, llm=llm, policy=policy: run(llm, policy, make_requests(args.requests, i))
        engines.append(llm)
        found[policy.name] = []
    for repetition in range(args.repeats):
        for name, one in measure.items():
            found[name].append(one(repetition))
    rows = []
    n_tokens = sum(one.output_len for one in make_requests(args.requests, 0))
    for name, runs in found.items():
        seconds = [sum(part.elapsed_s for part in parts) for parts in runs]
        gaps = [gap for parts in runs for gap in gaps_ms(parts)]
        rows.append({
            "policy": name, "output_tokens_per_second": n_tokens / min(seconds),
            "p99_gap_ms": percentile(gaps, 99), "max_gap_ms": max(gaps), "elapsed_times": seconds,
        })  # fmt: skip
        print(
            f"{name:<30}{rows[-1]['output_tokens_per_second']:10,.0f} tokens/s, p99 gap {percentile(gaps, 99):6.2f} ms"
        )
    for llm in engines:
        llm.shutdown()
    write_report(args.output, build_report("baselines on a CPU", vars(args), {"rows": rows}, argv=[parser.prog, *argv]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
