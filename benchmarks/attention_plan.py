"""What planning a step of attention for a GPU costs the host: cutting into lines of work, and preparing the upload.

    python benchmarks/attention_plan.py [--reps 500] [--out benchmarks/results/attention_plan.json]

Prints one JSON line with commit, hardware and command, microseconds. 132 CTAs, 32 query heads on 8 KV heads, pages
of 16 tokens. cut: the lists; upload: and their concatenation; make: and the tensors and views; fill: into fixed
buffers. The device is the CPU: copies to a GPU are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import AttnPlan, AttnSpans, Heads, Layout, SharedPrefix
from quire.kernels.attention.schedule.tiles import cut

N_CTAS = 132
MAX_LARGE = 192


def plan_of(lengths: np.ndarray, kv_lens: np.ndarray, **options: object) -> AttnPlan:
    spans = AttnSpans(
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        kv_lens.astype(np.int32),
        np.arange(len(kv_lens), dtype=np.int32),
    )
    table = torch.zeros(len(kv_lens), 8192, dtype=torch.int32)
    return AttnPlan(Layout.PAGED, Heads(32, 8, 128), 16, spans, table, **options)


def steps() -> dict[str, AttnPlan]:
    """Name → step. Lengths of 256 sequences: lognormal, up to 10k."""
    rng = np.random.default_rng(0)
    kv_lens = np.minimum(rng.lognormal(7.3, 0.8, 256), 10_000).astype(np.int64) + 1
    ones = np.ones(256, np.int64)
    chunks = ones.copy()
    chunks[:6] = 512
    return {
        "decode_256": plan_of(ones, kv_lens),
        "mixed_256": plan_of(chunks, np.maximum(kv_lens, chunks)),
        "decode_1_of_16k": plan_of(ones[:1], np.array([16384])),
        "decode_64": plan_of(ones[:64], kv_lens[:64]),
        "prefill_1k": plan_of(np.array([1024]), np.array([1024])),
        "prefill_128_of_8k": plan_of(np.array([128]), np.array([8192])),
        "window_256": plan_of(ones, kv_lens, window=1024, n_first=4),
        "shared_256": plan_of(ones, kv_lens + 2048, shared=[SharedPrefix(range(256), 2048)]),
        "batch_invariant_256": plan_of(ones, kv_lens, batch_invariant=True),
    }


def timed(act: Callable[[], object], n: int) -> dict[str, float]:
    """Median and p99 of n calls, in microseconds."""
    for _ in range(10):
        act()
    taken = []
    for _ in range(n):
        started = time.perf_counter()
        act()
        taken.append((time.perf_counter() - started) * 1e6)
    taken.sort()
    return {"median": round(statistics.median(taken), 1), "p99": round(taken[int(n * 0.99)], 1)}


def upload(plan: AttnPlan) -> np.ndarray:
    made = cut(plan, N_CTAS)
    return np.concatenate([getattr(made, name).reshape(-1) for name in work.ARRAYS])


def measure(plan: AttnPlan, n: int) -> dict[str, object]:
    made = cut(plan, N_CTAS)
    buffers = work.Buffers(plan, 256, MAX_LARGE, N_CTAS, span_tokens=1, max_rows=max(256, plan.n_rows))
    return {
        "small": len(made.small),
        "large": len(made.large),
        "merges": len(made.merges),
        "bytes": upload(plan).nbytes,
        "cut": timed(lambda: cut(plan, N_CTAS), n),
        "upload": timed(lambda: upload(plan), n),
        "make": timed(lambda: work.make(plan, n_ctas=N_CTAS), n),
        "fill": timed(lambda: buffers.fill(plan), n),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=500)
    results = pathlib.Path(__file__).parent / "results"
    parser.add_argument("--out", type=pathlib.Path, default=results / "attention_plan.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "commit": commit.stdout.strip(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": " ".join(["python", "benchmarks/attention_plan.py", *sys.argv[1:]]),
        "microseconds": {name: measure(plan, options.reps) for name, plan in steps().items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
