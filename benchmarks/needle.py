"""One request among random neighbours, many times: does a bit of its answer depend on them?

    python -m benchmarks.needle [--device cuda] [--trials 50] [--out benchmarks/results/needle.json]

Prints how many answers differed from the first, for each kind of engine, and how many drafts were verified; JSON has
commit, hardware and command.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
from typing import Any

import quire
from quire import LLM, SamplingParams
from quire.bench.report import build_report, write_report

NEIGHBOURS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
CHUNKS = {"cpu": (16, 64, 256, 1024, 4096), "cuda": (48, 512, 4096)}
DRAFTS = {"method": "ngram", "prompt_lookup_min": 1}
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "int8 keys": {"kv_cache_dtype": "int8"},
    "one thread": {"num_threads": 1},
    "drafts": {"speculative_config": DRAFTS},
    "no prefix cache, one step in flight": {"enable_prefix_caching": False, "pipeline_depth": 1},
}
SAME = ("bfloat16", "one thread", "drafts", "no prefix cache, one step in flight", "all ask", "one asks", "one by one")
"""Kinds whose answers must equal those of the first."""
CUDA_KINDS: dict[str, dict[str, Any]] = {
    "all ask": {"deterministic": True},
    "one asks": {},
    "drafts": {"deterministic": True, "speculative_config": DRAFTS},
    "one by one": {"deterministic": True, "enforce_eager": True, "enable_prefix_caching": False, "pipeline_depth": 1},
    "float16": {"deterministic": True, "dtype": "float16"},
    "nobody asks": {},
}
ON_CUDA = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192, "num_gpu_blocks_override": 4000}
FEW = [41, 57, 83, 112]
"""Tokens that the needle ends with, over and over. An answer of them alone is guessed, now right and now wrong,
whatever the model."""
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    {"temperature": 0.9, "seed": 8, "allowed_token_ids": FEW},
]


def needle_of(n_tokens: int) -> list[int]:
    """Random tokens, and behind them 100 of the few."""
    rng = random.Random(1)
    return [*(rng.randrange(5, 4000) for _ in range(n_tokens - 100)), *rng.choices(FEW, k=100)]


def trial(llm: LLM, needle: list[int], rng: random.Random, *, asks: bool) -> list[Any]:
    """Its tokens and log-probabilities, greedy and sampled, in random company."""
    said: list[Any] = []
    for wish in WISHES:
        n = rng.choice(NEIGHBOURS)
        prompts = [[rng.randrange(5, 4000) for _ in range(rng.randint(4, 150))] for _ in range(n)]
        params = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=rng.randint(2, 40), ignore_eos=True) for i in range(n)
        ]
        at = rng.randint(0, n)
        prompts.insert(at, needle)
        params.insert(at, SamplingParams(max_tokens=32, ignore_eos=True, logprobs=2, deterministic=asks, **wish))
        if rng.random() < 0.5:
            llm.reset_prefix_cache()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        one = llm.generate(given, params, use_tqdm=False)[at].outputs[0]
        said.append((one.token_ids, [(token, row[token].logprob) for row in one.logprobs for token in row]))
    return said


def engine(device: str, chunk: int, options: dict[str, Any]) -> LLM:
    """The demo model, or on a GPU the shape of Qwen3-0.6B with random weights."""
    model = "" if device == "cpu" else str(pathlib.Path(quire.__file__).parent / "bench/shapes/qwen3-0.6b")
    sizes = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 160)}
    llm = LLM(model, **({} if device == "cpu" else ON_CUDA), **options, **sizes)
    llm.engine.scheduler.live.drafts.costs = None  # as many drafts as there is room for
    return llm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--kinds", nargs="+", help="of the table; the first of them that must be alike is compared to")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    kinds, chunks = CUDA_KINDS if args.device == "cuda" else KINDS, CHUNKS[args.device]
    kinds = {kind: kinds[kind] for kind in args.kinds or kinds}
    n_each = -(-args.trials // len(chunks))
    # on a GPU products of prompts that long, and decode steps behind them, are cut
    needle = needle_of(2500 if args.device == "cuda" else 300)
    rows, first = [], {}
    for kind, options in kinds.items():
        n_other, n_verified, n_right, group = 0, 0, 0, SAME if kind in SAME else kind
        for chunk in chunks:
            llm = engine(args.device, chunk, options)
            rng = random.Random(f"{kind} {chunk}")
            for _ in range(n_each):
                said = trial(llm, needle, rng, asks=kind == "one asks")
                n_other += said != first.setdefault(group, said)
            n_verified += llm.stats().draft_tokens
            n_right += llm.stats().accepted_tokens
            llm.shutdown()
        rows.append({
            "kind": kind, "trials": n_each * len(chunks), "different": n_other,
            "drafts_verified": n_verified, "drafts_right": n_right,
        })  # fmt: skip
        print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="\t", flush=True)
    if args.out:
        write_report(args.out, build_report("needle", vars(args), {"rows": rows}))
    for row in rows:
        if "speculative_config" in kinds[row["kind"]] and not 0 < row["drafts_right"] < row["drafts_verified"]:
            sys.exit(f"{row}: some drafts must be right and some wrong, or the answers say nothing of them")


if __name__ == "__main__":
    main()
