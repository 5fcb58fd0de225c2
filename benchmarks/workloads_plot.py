"""The named workloads beside the peers: a table, and a chart of speed relative to vLLM.

    python -m benchmarks.workloads_plot benchmarks/results/h200 docs/performance-gpu.png

reads w1.json .. w6.json (`benchmarks/gpu.sh`) and peers.json of a folder and writes the chart of docs/performance.md.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

CASES = (
    # name in peers.json, report, case of the report (None: a rate), figure
    ("W1 0.6B", "w1", None, "output_tokens_per_second"),
    ("W2 8B", "w2", None, "output_tokens_per_second"),
    ("W3 8B", "w3", None, "output_tokens_per_second"),
    ("W5 8B", "w5", None, "output_tokens_per_second"),
    ("W4 0.6B", "w4_06b", 0, "p50_tpot_ms"),
    ("W4 8B", "w4_8b", 0, "p50_tpot_ms"),
    ("first token 0.6B 1k", "w4_06b", 1, "p50_ttft_ms"),
    ("first token 8B 1k", "w4_8b", 1, "p50_ttft_ms"),
    ("first token 8B 8k", "w4_8b", 2, "p50_ttft_ms"),
    *((f"W6 batch {size}", "w6", i, "decode_step_ms") for i, size in enumerate((1, 8, 32, 128, 256))),
)


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
    """One row a figure: name, unit, ours, and what peers.json says of it."""
    peers = json.loads((folder / "peers.json").read_text())["figures"]
    rows = []
    for name, report, case, figure in CASES:
        results = json.loads((folder / f"{report}.json").read_text())["results"]
        ours = results[figure] if case is None else results["cases"][case][figure]
        rows.append({"name": name, "ours": ours, **peers[name]})
    return rows


def speed(row: dict[str, Any], who: str) -> float | None:
    """How many times as fast as vLLM; None where there is no figure."""
    if who not in row:
        return None
    return row[who] / row["vllm"] if row["unit"] == "tok/s" else row["vllm"] / row[who]


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Bars of ours and SGLang, marks of the limit; needs matplotlib."""
    from matplotlib.figure import Figure  # an optional package

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    for who, label, color, shift in (("ours", "Quire", "#2a6f97", -0.2), ("sglang", "SGLang", "#adb5bd", 0.2)):
        axes.bar([x + shift for x in places], [speed(row, who) for row in rows], 0.4, label=label, color=color)
    points = [(x, speed(row, "limit")) for x, row in enumerate(rows) if "limit" in row]
    axes.plot(*zip(*points, strict=True), "^", color="black", markersize=9, label="limit of the hardware")
    axes.axhline(1, color="#c1121f", linewidth=1, label="vLLM")
    axes.set_ylim(0, 2.5)
    axes.set_ylabel("speed, vLLM = 1 (marks above 2.5 are cut off)")
    axes.set_xticks(places, [row["name"] for row in rows], rotation=35, ha="right")
    axes.legend(ncols=4)
    figure.savefig(path, dpi=120)


def cell(value: float | None, unit: str) -> str:
    """One figure of the table."""
    if value is None:
        return f"{'':>10}"
    return f"{value:>10,.0f}" if unit == "tok/s" else f"{value:>10.2f}"


def main(folder: pathlib.Path, path: pathlib.Path) -> None:
    rows = read(folder)
    print(f"{'':<20}{'Quire':>10}{'vLLM':>10}{'SGLang':>10}{'target':>10}{'limit':>10}")
    for row in rows:
        columns = "".join(cell(row.get(who), row["unit"]) for who in ("ours", "vllm", "sglang", "target", "limit"))
        is_met = row["ours"] >= row["target"] if row["unit"] == "tok/s" else row["ours"] <= row["target"]
        print(f"{row['name']:<20}{columns}  {row['unit']}{'' if is_met else '  misses the target'}")
    draw(rows, path)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
