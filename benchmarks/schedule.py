"""What control costs on one core: planning and committing a steady decode step, and operations of the prefix tree.

    python benchmarks/schedule.py [--seqs 1000] [--steps 400] [--out benchmarks/results/schedule.json]

Prints a table and writes JSON with commit, hardware and command. No device: results are made up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable

from quire.control.config import SchedulerConfig
from quire.control.pages import PagePool
from quire.control.scheduler import Scheduler
from quire.control.tree import PrefixTree
from quire.core.clock import MonotonicClock
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams

PAGE_SIZE = 16


def spread(seconds: list[float], scale: float) -> dict[str, float]:
    """Median, p99 and largest of timings, times `scale`."""
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered) * scale, 4),
        "p99": round(ordered[int(len(ordered) * 0.99)] * scale, 4),
        "max": round(ordered[-1] * scale, 4),
    }


def steady_decode(n_seqs: int, n_steps: int, lockstep: bool) -> dict[str, object]:
    """`n_seqs` sequences decode, two steps in flight; `lockstep`: all cross page borders in the same step."""
    rng = random.Random(0)
    config = SchedulerConfig(
        n_pages=n_seqs * (512 + n_steps) // PAGE_SIZE + n_seqs,
        page_size=PAGE_SIZE,
        max_num_seqs=n_seqs,
        max_num_batched_tokens=max(8192, n_seqs),
        max_model_len=4096,
    )
    scheduler = Scheduler(config, MonotonicClock())
    for i in range(n_seqs):
        prompt = [rng.randrange(30_000) for _ in range(256 if lockstep else rng.randint(128, 384))]
        params = SamplingParams(max_tokens=n_steps + 200)
        scheduler.submit(
            Request(request_id=str(i), prompt_token_ids=prompt, params=params, max_tokens=n_steps + 200, seed=i)
        )
    in_flight: deque[StepPlan] = deque()
    plan_s, commit_s = [], []
    while len(plan_s) < n_steps:
        started = time.perf_counter()
        plan = scheduler.schedule()
        elapsed = time.perf_counter() - started
        assert plan is not None
        if len(plan.spans) == plan.n_tokens == n_seqs:
            plan_s.append(elapsed)
        in_flight.append(plan)
        if len(in_flight) == 2:
            oldest = in_flight.popleft()
            n_wants = sum(oldest.spans.wants)
            result = StepResult(oldest.step, [5] * n_wants, [1] * n_wants)
            started = time.perf_counter()
            scheduler.commit(result)
            if n_wants == n_seqs:
                commit_s.append(time.perf_counter() - started)
    started = time.perf_counter()
    scheduler.stats()
    return {
        "n_seqs": n_seqs,
        "n_steps": len(plan_s),
        "schedule_ms": spread(plan_s, 1e3),
        "commit_us_per_token": spread(commit_s, 1e6 / n_seqs),
        "stats_ms": round((time.perf_counter() - started) * 1e3, 3),
    }


def timed(n: int, act: Callable[[int], object]) -> list[float]:
    """Seconds of act(0) .. act(n-1)."""
    seconds = []
    for i in range(n):
        started = time.perf_counter()
        act(i)
        seconds.append(time.perf_counter() - started)
    return seconds


def radix(n_prompts: int, prompt_len: int, shared_len: int) -> dict[str, object]:
    """Insert, match, lock with unlock, and evict, for prompts that share their beginning."""
    rng = random.Random(0)
    n_pages = prompt_len // PAGE_SIZE
    pool = PagePool(n_prompts * n_pages + 1)
    tree = PrefixTree(pool, PAGE_SIZE)
    shared = [rng.randrange(30_000) for _ in range(shared_len)]
    prompts = [shared + [rng.randrange(30_000) for _ in range(prompt_len - shared_len)] for _ in range(n_prompts)]

    def insert(i: int) -> None:
        pages = pool.take(n_pages)
        node, _ = tree.extend("", None, 0, prompts[i], [pages], n_pages, through=True)
        assert node is not None
        tree.unlock(node)
        pool.drop(pages)

    def lock(i: int) -> None:
        node = tree.lock(tree.match("", prompts[i], prompt_len))
        assert node is not None
        tree.unlock(node)

    return {
        "n_prompts": n_prompts,
        "prompt_len": prompt_len,
        "shared_len": shared_len,
        "insert_us": spread(timed(n_prompts, insert), 1e6),
        "match_us": spread(timed(n_prompts, lambda i: tree.match("", prompts[i], prompt_len)), 1e6),
        "match_lock_unlock_us": spread(timed(n_prompts, lock), 1e6),
        "evict_page_us": spread(timed(n_prompts, lambda i: tree.evict(1)), 1e6),
    }


def tune_gc() -> list[int]:
    """Collect old objects seldom: with the default thresholds a full collection stops a step for 10 ms and more."""
    gc.set_threshold(10_000, 20, 50)
    return list(gc.get_threshold())


def hardware() -> str:
    """Processor name and core count."""
    names = [
        line.split(":", 1)[1].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results" / "schedule.json")
    options = parser.parse_args()
    report = {
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "hardware": hardware(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "command": " ".join(["python", "benchmarks/schedule.py", *sys.argv[1:]]),
        "steady_decode_default_gc": steady_decode(options.seqs, options.steps, lockstep=False),
        "gc_threshold": tune_gc(),
        "steady_decode": steady_decode(options.seqs, options.steps, lockstep=False),
        "steady_decode_lockstep": steady_decode(options.seqs, options.steps, lockstep=True),
        "radix_short": radix(2000, 512, 256),
        "radix_long": radix(500, 8192, 4096),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
