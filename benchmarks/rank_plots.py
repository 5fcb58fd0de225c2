"""Pictures of the experiments of several ranks, from their records.

    python -m benchmarks.rank_plots benchmarks/results/pipeline_bubbles_cpu.json docs/ranks-bubbles.png

What is drawn follows from the `benchmark` of the record. What it has no seconds of is drawn from the planner alone, and
the title says so.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Final

from benchmarks.context_parallel import expected_steps_s
from benchmarks.rank_engines import model_folder
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.planner.accelerators import accelerator_named
from quire.planner.cost import calibrated

COLORS: Final = {1: "#555555", 2: "#2a6f97", 4: "#e07a5f", 8: "#3d8361"}
WAYS: Final = {"one rank": "#555555", "ulysses": "#2a6f97", "ring": "#e07a5f"}
PLANNED: Final = ("shape:llama-3.1-8b", "h200", 4, 8192, [2**n for n in range(13, 21)])
"""Model, GPU, how many of them, tokens of a step and lengths of what is drawn without a measurement."""


def bubbles(report: dict[str, Any], figure: Any) -> None:
    """Idle share by micro-batches: the formula as lines, points on it."""
    rows, axes = report["results"]["rows"], figure.subplots()
    for stages in sorted({row["stages"] for row in rows}):
        own = [row for row in rows if row["stages"] == stages and row["load"] == "batch"]
        micro, color = [row["micro_batches"] for row in own], COLORS.get(stages, "black")
        axes.plot(micro, [100 * row["formula"] for row in own], color=color, label=f"{stages} stages, formula")
        axes.plot(micro, [100 * row["simulated"] for row in own], "x", color=color, label=f"{stages}, simulated")
        real = [(row["micro_batches"], 100 * row["idle"]) for row in own if row["idle"] is not None]
        if real:
            axes.plot(*zip(*real, strict=True), "o", color=color, fillstyle="none", label=f"{stages}, measured, mean")
        for stage in range(len(own[0].get("idle_stages") or [])):
            shares = [100 * row["idle_stages"][stage] for row in own]
            axes.plot(
                micro, shares, marker=f"${stage + 1}$", linestyle="", color=color, label=f"stage {stage + 1} of these"
            )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 100)
    axes.set_xlabel("micro-batches of one batch")
    axes.set_ylabel("time that a stage is idle, %")
    axes.set_title(f"Bubbles of a pipeline: (S - 1) / (M + S - 1); measured on {_where(report)}")
    axes.legend(ncols=2, fontsize=8)


def context(report: dict[str, Any], figure: Any) -> None:
    """Bytes that a rank sends by length, counted beside the formula; and seconds, measured or planned."""
    rows = report["results"]["rows"]
    left, right = figure.subplots(1, 2)
    heads = max(row["kv_heads"] for row in rows)
    for row in (row for row in rows if "sent_bytes" in row and row["kv_heads"] == heads):
        row["line"] = row["method"], row["ranks"]
    for line in sorted({row["line"] for row in rows if "line" in row}):
        own = [row for row in rows if row.get("line") == line]
        tokens, style = [row["tokens"] for row in own], "-" if line[1] == 2 else "--"
        left.plot(tokens, [row["formula_bytes"] / 1e6 for row in own], style, color=WAYS[line[0]])
        left.plot(tokens, [row["sent_bytes"] / 1e6 for row in own], "o", color=WAYS[line[0]], fillstyle="none",
                  label=f"{line[0]}, {line[1]} ranks")  # fmt: skip
    left.set_title(f"MB that a rank sends: formula (lines), counted (circles); {_where(report)}", fontsize=9)
    left.set_ylabel("MB")
    if report["config"]["device"] == "cuda":
        _measured_seconds(rows, right)
        right.set_title(f"First token: measured (circles), planner (lines); {_where(report)}", fontsize=9)
    else:
        _planned_seconds(right)
    right.set_ylabel("seconds")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens of the prompt")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)


def _measured_seconds(rows: list[dict[str, Any]], axes: Any) -> None:
    for method, ranks in sorted({(row["method"], row["ranks"]) for row in rows}):
        own = [row for row in rows if (row["method"], row["ranks"]) == (method, ranks)]
        tokens, color = [row["tokens"] for row in own], WAYS[method]
        axes.plot(tokens, [row["seconds"] for row in own], "o", color=color, fillstyle="none",
                  label=f"{method}, {ranks} GPUs" if ranks > 1 else method)  # fmt: skip
        if all(row["expected_s"] is not None for row in own):
            axes.plot(tokens, [row["expected_s"] for row in own], color=color)


def _planned_seconds(axes: Any) -> None:
    model, gpu, n_ranks, chunk, lengths = PLANNED
    with model_folder(model) as folder:
        arch = read_arch(pathlib.Path(folder))
    meshes = {"one rank": Mesh(), "ulysses": Mesh(sp=n_ranks), "ring": Mesh(ring=n_ranks)}
    for name, mesh in meshes.items():
        cost = calibrated(arch, accelerator_named(gpu), mesh=mesh)
        seconds = [expected_steps_s(cost, length, chunk) for length in lengths]
        axes.plot(lengths, seconds, "-" if name != "ring" else "--", color=WAYS[name], label=name)
    axes.set_title(f"First token, 8B on {n_ranks} {gpu.upper()}: by the planner", fontsize=9)


def tensor_table(report: dict[str, Any], figure: Any) -> None:
    """Latency against throughput of each number of ranks, a picture for each pair of lengths."""
    rows = report["results"]["rows"]
    pairs = list(dict.fromkeys((row["input"], row["output"]) for row in rows))
    for axes, pair in zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True):
        for ranks in sorted({row["ranks"] for row in rows}):
            own = [row for row in rows if (row["input"], row["output"]) == pair and row["ranks"] == ranks]
            batches, color = [row["batch"] for row in own], COLORS.get(ranks, "black")
            if all(row["ms"] is not None for row in own):
                axes.plot(batches, [row["ms"] for row in own], "o-", color=color, label=f"{ranks} ranks")
            for key, style, who in (("expected_ms", ":", "planner"), ("published_ms", "--", "FasterTransformer")):
                known = [(row["batch"], row[key]) for row in own if row[key] is not None]
                if known:
                    axes.plot(*zip(*known, strict=True), style, color=color, alpha=0.7, label=f"{ranks}, {who}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{pair[0]} in, {pair[1]} out")
        axes.set_xlabel("batch")
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("ms of a whole batch")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=6)
    planned = report["config"].get("planned")
    figure.suptitle(
        f"{f'planned on {planned}' if planned else _where(report)}; FasterTransformer's on A100s", fontsize=9
    )


def _where(report: dict[str, Any]) -> str:
    gpus = report["hardware"]["gpus"]
    if report["config"]["device"] == "cuda" and gpus:
        return str(gpus[0]["name"])
    return f"{report['hardware']['n_cores']} shared CPU cores"


DRAWN: Final[dict[str, tuple[Callable[[dict[str, Any], Any], None], tuple[float, float]]]] = {
    "pipeline_bubbles": (bubbles, (8, 4.5)),
    "context_parallel": (context, (12, 4.5)),
    "tensor_parallel_table": (tensor_table, (14, 4)),
}
"""Benchmark → how it is drawn, and inches."""


def draw(report: dict[str, Any], path: str) -> None:
    """Write a PNG; needs matplotlib."""
    from matplotlib.figure import Figure  # an optional package

    drawn, size = DRAWN[report["benchmark"]]
    figure = Figure(figsize=size, layout="constrained")
    drawn(report, figure)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(json.loads(pathlib.Path(sys.argv[1]).read_text()), sys.argv[2])
