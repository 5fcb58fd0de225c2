"""Minutes of random traffic over small random models with poisoned memory: no wrong token, nothing leaked.

    python benchmarks/soak.py --seconds 600 --device auto --seed 0 --output soak.json

The time is divided between the rounds of `ROUNDS` (family, dtype, options), each with its own engine. Arrivals, shared
prefixes, cancellations and odd parameters come from the seed; pages and table rows that nobody owns are filled with NaN
and wrong entries all the time; transformers judges every token, every logprob and the cached keys and values. See
tests/traffic. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from typing import Any, Final

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from traffic import soak  # noqa: E402
from traffic.checkpoint import SMALL, WIDE, write_checkpoint  # noqa: E402

from quire.bench.report import build_report, write_report  # noqa: E402

MAX_SHOWN: Final = 600
"""Characters of a fault that are printed; the report has all."""
ROUNDS: Final[list[tuple[str, str, dict[str, Any]]]] = [
    ("Llama", "bfloat16", {}),
    ("Qwen3", "float32", {"max_num_batched_tokens": 64, "pipeline_depth": 3}),
    ("Mistral", "bfloat16", {"block_size": 32, "num_gpu_blocks_override": 56, "scheduling_policy": "priority"}),
    ("Qwen2", "float32", {"enforce_eager": True}),
    ("Qwen3", "bfloat16", {"enforce_eager": True, "long_prefill_token_threshold": 100}),
    ("Llama", "float32", {"enable_prefix_caching": False, "pipeline_depth": 1}),
]
"""Family, dtype and what differs from `traffic.soak.CPU` or `CUDA`."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random traffic with poisoned memory, judged token by token.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, default=-1, help="only this one of the rounds, from 0")
    parser.add_argument("--output", default="", help="file for the report; none is written without it")
    return parser.parse_args()


def run_round(number: int, device: str, seconds: float, seed: int) -> soak.Summary:
    """One engine under traffic for about so many seconds."""
    family, dtype, options = ROUNDS[number]
    base, shape = (soak.CUDA, WIDE) if device == "cuda" else (soak.CPU, SMALL)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = write_checkpoint(folder, family, shape, getattr(torch, dtype), seed)
        return soak.Soak(folder, model, seed, **{**base, **options}).run(seconds)


def show(number: int, summary: soak.Summary) -> None:
    """A few lines for people."""
    family, dtype, options = ROUNDS[number]
    verdicts = summary.verdicts
    print(f"round {number}: {family} {dtype} {options}, {summary.seconds:.0f} s, {summary.steps} steps")
    print(
        f"  requests {summary.requests} ({summary.sequences} sequences), refused {sum(summary.refused.values())}, "
        f"cancelled {summary.cancels}, made to fail {summary.doomed}, ends {summary.finished}"
    )
    print(
        f"  tokens {summary.tokens}, checked {verdicts.n_tokens}: {verdicts.n_best} exact; of {verdicts.n_greedy} "
        f"greedy ones {verdicts.n_greedy_best} exact; logprobs {verdicts.n_logprobs}, off by at most "
        f"{verdicts.worst_logprob:.2g}"
    )
    print(
        f"  steps by kind {dict(summary.kinds)}, preemptions {summary.preemptions}, prompt tokens from the cache "
        f"{summary.prefix_hits}, cached pages checked {verdicts.n_pages}, off by {verdicts.worst_key:.2g}"
    )
    print(f"  idle moments {summary.idle_moments}, objects {summary.objects_first} -> {summary.objects_last}")
    print(f"  mismatches {len(verdicts.faults)}, wrong answers {len(summary.protocol)}, leaks {len(summary.leaks)}")
    for fault in summary.faults:
        print(f"  FAULT {fault[:MAX_SHOWN]}")
    sys.stdout.flush()


def main() -> int:
    args = parse_arguments()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    numbers = [args.round] if args.round >= 0 else list(range(len(ROUNDS)))
    found = {}
    for number in numbers:
        found[number] = run_round(number, device, args.seconds / len(numbers), args.seed + number)
        show(number, found[number])
    n_faults = sum(len(summary.faults) for summary in found.values())
    n_tokens = sum(summary.verdicts.n_tokens for summary in found.values())
    print(f"{n_tokens} tokens checked on {device}, {n_faults} faults")
    if args.output:
        results = [
            {"family": ROUNDS[n][0], "dtype": ROUNDS[n][1], "options": ROUNDS[n][2], **dataclasses.asdict(summary)}
            for n, summary in found.items()
        ]
        write_report(args.output, build_report("soak", {**vars(args), "device": device}, {"rounds": results}))
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
