"""Sequences that run over time, a panel for each policy of a report of `benchmarks.baselines`.

    python -m benchmarks.baselines_plot benchmarks/results/h200/baselines.json docs/baselines-h200.png
"""

from __future__ import annotations

import json
import pathlib
import sys

COLORS = ("#94a3b8", "#64748b", "#ea580c", "#d97706", "#2563eb", "#059669")


def draw(report: pathlib.Path, path: pathlib.Path) -> None:
    """Needs matplotlib."""
    from matplotlib.figure import Figure  # an optional package

    rows = json.loads(report.read_text())["results"]["rows"]
    figure = Figure(figsize=(8, 1.15 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True)
    for axes, row, color in zip(panels, rows, COLORS, strict=True):
        axes.fill_between(row["line"]["time_s"], row["line"]["n_running"], step="post", color=color, alpha=0.8, lw=0)
        title = f"{row['policy']}: {row['output_tokens_per_second']:,.0f} tokens/s, {row['mean_running']:.0f} at once"
        axes.set_title(title, fontsize=8, loc="left", pad=2)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    panels[-1].set_xlim(left=0)
    panels[-1].set_xlabel("seconds", fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
