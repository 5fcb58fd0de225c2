"""Sampling against plain torch (softmax, topk, sort, multinomial), timed in turns in one run; medians.
`python benchmarks/kernels_sample.py [--device cpu|cuda] [--rows 64] [--width 151936] [--threads 2]`.

Logits are normal with deviation 3, flatter than a language model's: top-p has thousands of candidates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from quire.kernels.sample import Draw, choose

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
}


def make_draw(n_rows: int, temperature: float = 0.7, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Draw:
    return Draw(
        temperature=np.full(n_rows, temperature, np.float32),
        uniform=np.random.default_rng(0).random(n_rows),
        top_k=np.full(n_rows, top_k, np.int32),
        top_p=np.full(n_rows, top_p, np.float32),
        min_p=np.full(n_rows, min_p, np.float32),
    )


def plain(
    logits: torch.Tensor, temperature: float = 0.7, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """What one writes without a sampling library."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if min_p:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p < 1:
        values, order = logits.sort(-1)
        dropped = values.softmax(-1).cumsum(-1) <= 1 - top_p
        logits = logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)


def medians_s(calls: list[Callable[[], object]], synchronize: Callable[[], None], repeats: int) -> list[float]:
    """Median seconds of each call, run in turns after one warm-up each."""
    taken: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for times, call in zip(taken, calls, strict=True):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            if turn:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=151936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", default="", help="write the rows to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logits = torch.randn(options.rows, options.width, generator=torch.Generator().manual_seed(0)).to(options.device) * 3
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    rows = []
    for name, values in CASES.items():
        draw = make_draw(options.rows, **values)
        calls = [lambda draw=draw: choose(logits, draw), lambda values=values: plain(logits, **values)]
        ours, theirs = medians_s(calls, synchronize, options.repeats)
        case = f"sample {name} [{options.rows}, {options.width}] {options.device}"
        rows.append({"case": case, "unit": "us", "ours": round(ours * 1e6, 1), "torch": round(theirs * 1e6, 1)})
        print(rows[-1])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
