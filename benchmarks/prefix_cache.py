"""What the prefix cache saves, and how full the KV pages are.

    python -m benchmarks.prefix_cache

First 32 requests with a common prefix of 512 tokens, with and without the cache, in turns, a fresh prefix each time and
equal outputs demanded. Then a mixed run in which tokens held and slots taken are read after every step.
Exit code 1 if outputs differ or the pages are less than 96 % full.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import sys

from quire import LLM
from quire.bench.datasets import from_lengths
from quire.bench.machine import n_cores
from quire.bench.offline import TimedRun, exact_params, timed_run
from quire.bench.report import build_report, write_report
from quire.bench.summary import percentile

RESULTS = pathlib.Path(__file__).with_name("results")
PREFIX_LEN, OWN_LEN, OUTPUT_LEN = 512, 32, 32
MIN_UTILISATION = 0.96


def mean_ttft_ms(run: TimedRun) -> float:
    """Mean time from submission to the first token, in ms."""
    times = [output.metrics for output in run.outputs]
    return 1000 * statistics.mean((one.first_token_s or 0) - one.arrival_s for one in times)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prefix cache on and off, and utilisation of the KV pages.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--mixed-requests", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=n_cores())
    parser.add_argument("--output", default=str(RESULTS / "prefix_cache.json"))
    return parser.parse_args()


def make_engine(args: argparse.Namespace, enable_prefix_caching: bool) -> LLM:
    return LLM(args.model, num_threads=args.threads, max_num_seqs=32, enable_prefix_caching=enable_prefix_caching)


def measure_cache(args: argparse.Namespace) -> dict[str, object]:
    """Both engines in turns on the same fresh prompts."""
    engines = {"on": make_engine(args, True), "off": make_engine(args, False)}
    width = engines["on"].logits_width
    dataset = from_lengths([(OWN_LEN, OUTPUT_LEN)] * args.requests, width, seed=0, prefix_len=PREFIX_LEN)
    runs: dict[str, list[TimedRun]] = {name: [] for name in engines}
    for repetition in range(-1, args.repeats):
        for name, llm in engines.items():
            timed = timed_run(llm, dataset(repetition), temperature=0.0)
            if repetition >= 0:
                runs[name].append(timed)
    for llm in engines.values():
        llm.shutdown()
    result: dict[str, object] = {}
    for name, timed_runs in runs.items():
        elapsed_s = statistics.median(one.elapsed_s for one in timed_runs)
        result[name] = {
            "elapsed_time": elapsed_s,
            "output_tokens_per_second": args.requests * OUTPUT_LEN / elapsed_s,
            "mean_ttft_ms": statistics.median(mean_ttft_ms(one) for one in timed_runs),
            "cached_tokens_per_request": statistics.mean(
                output.num_cached_tokens for one in timed_runs for output in one.outputs
            ),
        }
    result["speedup"] = statistics.median(
        off.elapsed_s / on.elapsed_s for on, off in zip(runs["on"], runs["off"], strict=True)
    )
    result["equal_outputs"] = all(
        on.token_ids == off.token_ids for on, off in zip(runs["on"], runs["off"], strict=True)
    )
    return result


def measure_utilisation(args: argparse.Namespace) -> dict[str, object]:
    """Requests of 64 to 768 prompt and 16 to 256 output tokens through 32 slots; gauges are read after every step."""
    rng = random.Random(1)
    lengths = [(rng.randint(64, 768), rng.randint(16, 256)) for _ in range(args.mixed_requests)]
    llm = make_engine(args, True)
    held, taken = [], []

    def sample(_: object) -> None:
        stats = llm.stats()
        if stats.n_slots_taken:
            held.append(stats.n_tokens_held)
            taken.append(stats.n_slots_taken)

    llm.on_step = sample
    requests = from_lengths(lengths, llm.logits_width, seed=1)(0)
    llm.generate([one.prompt_token_ids for one in requests], exact_params(requests, 0.0), use_tqdm=False)
    llm.shutdown()
    shares = [tokens / slots for tokens, slots in zip(held, taken, strict=True)]
    return {
        "n_steps": len(shares),
        "utilisation": sum(held) / sum(taken),
        "median": percentile(shares, 50),
        "p1": percentile(shares, 1),
        "most_slots_taken": max(taken),
    }


def main() -> int:
    args = parse_arguments()
    cache = measure_cache(args)
    utilisation = measure_utilisation(args)
    results = {"prefix_cache": cache, "kv_utilisation": utilisation}
    for name, figures in results.items():
        print(name, figures)
    write_report(args.output, build_report("prefix_cache", vars(args), results))
    return 0 if cache["equal_outputs"] and float(str(utilisation["utilisation"])) >= MIN_UTILISATION else 1


if __name__ == "__main__":
    sys.exit(main())
