"""Products of weights in a format by rows, alone on a GPU: what `plan_kernels` makes a format's curve of.

    python -m benchmarks.product_rows --output benchmarks/results/h200/kernels_products.json

The four matrices of a layer of the 8B shape, and few rows by the two large ones of the 70B's, which tell how fast a
large matrix is read; gate and up with their activation, through the ops that the engine calls. Kernels are built
beforehand, several at a time. Inputs are larger than the cache, calls are captured, medians count. Forms and matrices
that are not asked for keep what the file has of them, so one kernel that is new is one command.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import operator
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from quire.bench.kernels.case import Setting
from quire.bench.kernels.coded import packed
from quire.bench.kernels.linear import LinearCase
from quire.bench.kernels.timing import Call, timer
from quire.bench.machine import commit, n_cores, package_versions
from quire.kernels import gemm, w4a16, w8a8

MATRICES: Final = {
    "8b qkv": LinearCase(6144, 4096), "8b o": LinearCase(4096, 4096),
    "8b gate_up": LinearCase(28672, 4096, silu_mul=True), "8b down": LinearCase(4096, 14336),
    "70b gate_up": LinearCase(57344, 8192, silu_mul=True), "70b down": LinearCase(8192, 28672),
}  # fmt: skip
LARGE_ROWS: Final = 64
"""Of the 70B's matrices, at most."""
ROWS: Final = (
    1, 8, 16, 17, 32, 48, 64, 96, 128, 144, 160, 176, 192, 224, 256, 320, 384, 416, 448, 512, 768, 1024, 2048, 8192,
)  # fmt: skip
"""17: the first that kernels for few rows leave to others."""
OPS: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "bf16": gemm.linear, "fp8 channels": w8a8.linear_fp8, "g128": w4a16.linear,
}  # fmt: skip
"""Form → op."""
NUMBER_BYTES: Final = {"bf16": 2.0, "fp8 channels": 1.0, "g128": 0.5}
CACHES: Final = 8
"""Weights that are read in turn are so many times the cache: with twice, a matrix of bf16 was found in it in part, and
took 5 % less than reading it takes."""
BUDGET_S: Final = 0.03
"""Of one product of so many rows."""


def calls_of(form: str, layer: LinearCase, setting: Setting) -> Callable[[torch.Tensor], list[Call]]:
    """With rows: the product by each copy of the weights."""
    n_copies = 1 + int(CACHES * setting.timer.cache_bytes / (NUMBER_BYTES[form] * layer.n * layer.k))
    copies: list[tuple[object, ...]]
    if form == "bf16":
        copies = [(setting.randn(layer.n, layer.k),) for _ in range(n_copies)]
    else:
        copies = [tuple(part for part in packed(form, layer, setting) if part is not None) for _ in range(n_copies)]
    op = functools.partial(OPS[form], silu_mul=layer.silu_mul)
    return lambda x: [functools.partial(op, x, *weight) for weight in copies]


def measured(form: str, names: list[str], rows: list[int], setting: Setting) -> Iterator[dict[str, Any]]:
    """A row of the file for each matrix and number of rows."""
    for name in names:
        layer, most = MATRICES[name], LARGE_ROWS if name.startswith("70b") else max(rows)
        make = calls_of(form, layer, setting)
        inputs = [setting.randn(n_rows, layer.k) for n_rows in rows if n_rows <= most]
        calls = [make(x) for x in inputs]
        touch = functools.partial(torch.zeros, 1, device=setting.device)  # or a thread has no CUDA context to launch in
        with concurrent.futures.ThreadPoolExecutor(n_cores(), initializer=touch) as pool:
            list(pool.map(operator.call, [copies[0] for copies in calls]))  # builds what is new
        for x, copies in zip(inputs, calls, strict=True):
            us = 1e6 * setting.timer.sample(copies, BUDGET_S).median_s
            yield {"form": form, "n": layer.n, "k": layer.k, "rows": len(x), "us": round(us, 2)}


def write(path: pathlib.Path, report: dict[str, Any], hardware: str) -> None:
    """A line for each product."""
    head = {
        "benchmark": "products by rows, alone", "command": "python -m benchmarks.product_rows", "hardware": hardware,
        "packages": package_versions(), "commits": report["commits"],
    }  # fmt: skip
    lines = ",\n  ".join(json.dumps(row) for row in report["rows"])
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')


def main(say: Callable[[str], None] = print) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--matrices", nargs="+", choices=MATRICES, default=list(MATRICES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    setting = Setting(timer(options.device), torch.bfloat16)
    report = json.loads(options.output.read_text()) if options.output.exists() else {"rows": []}
    for form in options.forms:
        found = list(measured(form, options.matrices, options.rows, setting))
        sizes = {(MATRICES[name].n, MATRICES[name].k) for name in options.matrices}
        kept = [row for row in report["rows"] if row["form"] != form or (row["n"], row["k"]) not in sizes]
        report["rows"] = kept + found
        key = form if len(options.matrices) == len(MATRICES) else f"{form}: {', '.join(options.matrices)}"
        report["commits"] = report.get("commits", {}) | {key: commit()}
        write(options.output, report, setting.timer.name)
        for (n, k), group in itertools.groupby(found, lambda row: (row["n"], row["k"])):
            say(f"{form:<14}{n:>6} x {k:<6}" + "".join(f"{row['us']:9.1f}" for row in group) + " us")


if __name__ == "__main__":
    main()
