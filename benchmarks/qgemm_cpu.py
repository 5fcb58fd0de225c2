"""Linear layers of 8- and 4-bit weights on this CPU: GB/s of packed weights and GOP/s, beside torch's bf16 product.

    python benchmarks/qgemm_cpu.py [--threads 2] [--rows 1,4,8,16,512] [--seconds 0.3] [--out FILE]

Weights are read from copies that together exceed the last cache. Limits (bandwidth of reading, products of bytes) are
measured in the same run. Contenders alternate call by call; medians. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quire.kernels import native, qgemm

LAYERS = {
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "1b qkv": (3072, 2048),
    "1b o": (2048, 2048),
    "1b gate_up": (16384, 2048),
    "1b down": (2048, 8192),
}
"""Name → n, k."""
BEYOND_CACHE = 96 << 20
"""Bytes of copies; at many rows two copies do, arithmetic binds."""

Call = Callable[[], object]


def median_seconds(contenders: dict[str, Sequence[Call]], budget_s: float) -> dict[str, float]:
    """Median seconds of each one's calls, in turns; the k-th turn takes the k-th copy of the inputs."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    turn, end = 0, time.perf_counter() + budget_s * len(contenders)
    while turn < 4 or time.perf_counter() < end:
        for name, calls in contenders.items():
            start = time.perf_counter()
            calls[turn % len(calls)]()
            seconds[name].append(time.perf_counter() - start)
        turn += 1
    return {name: statistics.median(found[len(found) // 4 :]) for name, found in seconds.items()}


def copies(n_bytes: int, m: int) -> int:
    """How many copies of a weight to go round."""
    return 2 if m > 64 else max(2, BEYOND_CACHE // n_bytes + 1)


def measure_layer(n: int, k: int, m: int, budget_s: float) -> dict[str, dict[str, float]]:
    """Microseconds, GB/s and GOP/s of each scheme and of torch bf16."""
    x, block = torch.randn(m, k).bfloat16(), torch.randn(n, k).mul_(k**-0.5)
    plain = [block.bfloat16() for _ in range(copies(2 * n * k, m))]
    contenders: dict[str, Sequence[Call]] = {"bf16 torch": [lambda w=w: F.linear(x, w) for w in plain]}
    n_bytes = {"bf16 torch": 2 * n * k}
    for scheme in qgemm.SCHEMES:
        packed = [qgemm.pack(block, scheme) for _ in range(copies(n * k // 2, m))]
        contenders[scheme] = [lambda w=w: qgemm.linear(x, w) for w in packed]
        n_bytes[scheme] = packed[0].n_bytes
    return {
        name: {
            "us": round(1e6 * seconds, 1),
            "gb_s": round(n_bytes[name] / seconds / 1e9, 2),
            "gop_s": round(2 * m * n * k / seconds / 1e9, 1),
        }
        for name, seconds in median_seconds(contenders, budget_s).items()
    }


def limits(budget_s: float) -> dict[str, float]:
    """Best reading GB/s (torch's sum) and bf16 GFLOP/s of torch, and GOP/s of the int8 kernel within the cache."""
    words, square = torch.randn(1 << 20).repeat(64), torch.randn(1536, 1536).bfloat16()
    x, small = torch.randn(960, 1024).bfloat16(), qgemm.pack(torch.randn(256, 1024), "int8")
    calls: dict[str, Call] = {
        "read": words.sum,
        "bf16": lambda: square @ square,
        "int8": lambda: qgemm.linear(x, small),
    }
    best = dict.fromkeys(calls, float("inf"))
    for name, call in calls.items():
        end = time.perf_counter() + budget_s
        while time.perf_counter() < end:
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return {
        "read_gb_s": round(words.nbytes / best["read"] / 1e9, 1),
        "bf16_torch_gflop_s": round(2 * 1536**3 / best["bf16"] / 1e9),
        "int8_in_cache_gop_s": round(2 * 960 * 256 * 1024 / best["int8"] / 1e9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,4,8,16,512")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
        "torch": torch.__version__,
        "native": native.explain(),
        "limits": limits(options.seconds),
    }
    print(f"{report['native']} Limits: {report['limits']}")
    rows = []
    for name, (n, k) in LAYERS.items():
        for m in map(int, options.rows.split(",")):
            found = measure_layer(n, k, m, options.seconds)
            rows.append({"layer": name, "n": n, "k": k, "m": m, **found})
            cells = (f"{kind} {one['gb_s']:6.1f} GB/s {one['gop_s']:7.0f} GOP/s" for kind, one in found.items())
            print(f"{name:13}{m:4} rows  {'   '.join(cells)}", flush=True)
    report["rows"] = rows
    print(json.dumps(report))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
