"""The pairs with llama.cpp and ik_llama.cpp as a chart: how many times as fast, by number format and measure.

    python -m benchmarks.cpu_peers_plot benchmarks/results/cpu_peers.json docs/performance-cpu.png

reads a report of `benchmarks.cpu_peers`. Of a pair measured twice the later row counts.
"""

from __future__ import annotations

import json
import pathlib
import sys

MODEL = "qwen3-0.6b"
MEASURES = {"decode": "1 sequence", "8 sequences": "8 sequences", "16 sequences": "16 sequences",
            "prefill 512": "prefill of 512"}  # fmt: skip
PEERS = {"llama.cpp BF16": "bf16", "llama.cpp Q8_0": "8-bit", "llama.cpp Q4_0": "4-bit"}
OTHERS = {"ik_llama.cpp BF16": "bf16", "ik_llama.cpp Q8_0": "8-bit", "ik_llama.cpp Q4_0": "4-bit"}
COLORS = {"bf16": "#2a6f97", "8-bit": "#61a5c2", "4-bit": "#a9d6e5"}


def ratios(report: pathlib.Path, peers: dict[str, str]) -> dict[tuple[str, str], float]:
    """(measure, format) -> Quire's speed over the peer's, the median of the pairs' ratios."""
    rows = json.loads(report.read_text())["results"]["rows"]
    return {
        (row["measure"], peers[row["peer"]]): row["ratio"]
        for row in rows
        if row["model"] == MODEL and row["measure"] in MEASURES and row["peer"] in peers
    }


def draw(report: pathlib.Path, path: pathlib.Path) -> None:
    """Bars beside llama.cpp, marks beside ik_llama.cpp; needs matplotlib."""
    from matplotlib.figure import Figure  # an optional package

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    beside, others = ratios(report, PEERS), ratios(report, OTHERS)
    for i, (name, color) in enumerate(COLORS.items()):
        places = {measure: place + 0.27 * (i - 1) for place, measure in enumerate(MEASURES)}
        bars = axes.bar(places.values(), [beside[measure, name] for measure in MEASURES], 0.25, label=name, color=color)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
        points = [(places[measure], others[measure, name]) for measure in MEASURES if (measure, name) in others]
        axes.plot(*zip(*points, strict=True), "D", color="black", markersize=5,
                  label="beside ik_llama.cpp" if i == 0 else None)  # fmt: skip
    axes.axhline(1, color="#c1121f", linewidth=1, label="llama.cpp")
    axes.set_ylabel("times as fast as llama.cpp")
    axes.set_title("Qwen3-0.6B shape, two cores of an AMD EPYC with AVX-512")
    axes.set_xticks(range(len(MEASURES)), list(MEASURES.values()))
    axes.set_ylim(0, 5)
    axes.legend(ncols=5, loc="upper center")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
