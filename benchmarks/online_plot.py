"""The picture of `benchmarks.online`: latencies against load, and gaps between tokens around a long prompt.

    python -m benchmarks.online_plot online.json

draws a report again.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

METRICS = (("ttft_ms", "time to first token, ms"), ("tpot_ms", "time per output token, ms"))


def draw(results: dict[str, Any], path: str) -> None:
    """Write a PNG of a report's results; needs matplotlib."""
    from matplotlib.figure import Figure  # an optional package

    figure = Figure(figsize=(13, 4), layout="constrained")
    *upper, around = figure.subplots(1, 3)
    rates = results.get("rates", [])
    shares = [100 * rate["fraction"] for rate in rates]
    for axes, (name, label) in zip(upper, METRICS, strict=True):
        for share, style in (("p50", "-"), ("p99", "--")):
            axes.plot(shares, [rate[f"{share}_{name}"] for rate in rates], style, marker="o", label=share)
        axes.set_xlabel(f"load, % of {results['capacity_requests_per_s']:.1f} requests/s")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend()
    if "stall" in results:
        _draw_stall(around, results["stall"])
    figure.savefig(path, dpi=120)


def _draw_stall(axes: Any, stall: dict[str, Any]) -> None:
    axes.plot(stall["around_time_s"], stall["around_gap_ms"], ".", markersize=2)
    axes.axhline(stall["limit"] * stall["median_step_ms"], color="tab:red", linestyle="--", label="2 x median step")
    axes.axvspan(0, stall["prompts"][-1]["ttft_ms"] / 1000, alpha=0.12, label="prefill of the long prompt")
    axes.set_xlabel(f"seconds from the long prompt, {stall['n_streams']} streams")
    axes.set_ylabel("gap between tokens, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()


if __name__ == "__main__":
    report = pathlib.Path(sys.argv[1])
    draw(json.loads(report.read_text())["results"], str(report.with_suffix(".png")))
