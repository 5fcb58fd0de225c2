"""Draws a plan: the roofline with its operators on it, memory of a device, and the frontier of latency and throughput.

Owns the picture alone. matplotlib is an optional package, imported when something is drawn.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from quire.core.errors import ConfigError, shown
from quire.core.files import check_output

COLOURS: Final = {"decode": "#2563eb", "prefill": "#ea580c"}
GREEN: Final = "#059669"
INTENSITIES: Final = (0.25, 16384.0)
NEAR: Final = 2.5
"""Times the intensity of a point within which others share its label."""
APART: Final = 1.5
"""Times as many sequences as at the last label of the frontier have the next one."""
NEAR_SHARE: Final = 0.03
"""Of both sides of the picture: points nearer than that to the last label have none."""


def check_chart_path(path: str) -> None:
    """ConfigError, before anything is computed, for a name that cannot be drawn to."""
    if pathlib.Path(path).suffix != ".png":
        raise ConfigError(f"--plot {shown(path)}: the name must end with .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    check_output(path, "--plot")


def write_chart(path: str, plan: Mapping[str, Any]) -> None:
    """Three panels."""
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(15, 5), layout="constrained")
    roofline, memory, frontier = figure.subplots(1, 3, width_ratios=(5, 3, 4))
    figure.suptitle(f"{plan['model']} on {plan['device']['count']} x {plan['device']['name'].upper()}")
    _roofline(roofline, plan)
    _memory(memory, plan)
    _frontier(frontier, plan)
    figure.savefig(path, dpi=110)


def _roofline(axes: Any, plan: Mapping[str, Any]) -> None:
    device = plan["device"]
    reads, rate = device["read_bytes_per_s"], device["flops_per_s"]["bfloat16"]
    corner = rate / reads
    xs = [INTENSITIES[0], corner, INTENSITIES[1]]
    axes.loglog(xs, [min(rate, x * reads) / 1e12 for x in xs], color="#444", label="limit")
    for name, rows in plan.get("steps", {}).items():
        shown_rows = sorted(
            (row for row in rows if row["flops"] and row["intensity"] > INTENSITIES[0]),
            key=lambda row: row["intensity"],
        )
        points = [(row["intensity"], min(rate, row["intensity"] * reads) / 1e12) for row in shown_rows]
        axes.plot(*zip(*points, strict=True), "o", color=COLOURS[name], alpha=0.8, label=name)
        below = name == "prefill"
        for place, names in _together(shown_rows, points):
            axes.annotate(
                "\n".join(names), place, xytext=(5, -5) if below else (-5, 5), textcoords="offset points", fontsize=7,
                color=COLOURS[name], va="top" if below else "bottom", ha="left" if below else "right",
            )  # fmt: skip
    axes.set_xlabel("FLOPs a byte")
    axes.set_ylabel("TFLOP/s at most")
    axes.set_title("roofline")
    axes.set_ylim(top=10 * rate / 1e12)
    axes.set_xlim(left=INTENSITIES[0] / 5)  # room for labels on the left of their points
    axes.grid(alpha=0.25)
    axes.legend()


def _together(rows: list[dict[str, Any]], points: list[tuple[float, float]]) -> list[tuple[Any, list[str]]]:
    """(place, operators) of points that lie so near each other that one label stands for them."""
    found: list[tuple[tuple[float, float], list[str]]] = []
    for row, point in zip(rows, points, strict=True):
        if found and point[0] < NEAR * found[-1][0][0]:
            found[-1][1].append(row["operator"])
        else:
            found.append((point, [row["operator"]]))
    return list(found)


def _memory(axes: Any, plan: Mapping[str, Any]) -> None:
    memory, bottom = plan["memory"], 0.0
    terms = {name: n for name, n in memory["terms"].items() if n}
    terms["keys and values"] = memory["pages"] * memory["page_bytes"]
    for name, n_bytes in terms.items():
        axes.bar(0, n_bytes / 2**30, bottom=bottom, width=0.6, label=f"{name}, {n_bytes / 2**30:.1f} GiB")
        bottom += n_bytes / 2**30
    axes.axhline(memory["budget_bytes"] / 2**30, color="#444", linestyle="--", label="budget")
    axes.set_xlim(-0.5, 1.8)
    axes.set_xticks([])
    axes.set_ylabel("GiB of a device")
    axes.set_title(f"memory, {plan['meshes'][0]['mesh']}")
    axes.legend(fontsize=7, loc="center right")


def _frontier(axes: Any, plan: Mapping[str, Any]) -> None:
    points = plan.get("frontier", [])
    axes.plot([one["tpot_ms"] for one in points], [one["tokens_per_s"] for one in points], "o-", color=GREEN)
    told, last = 0.0, (-math.inf, -math.inf)
    sizes = [NEAR_SHARE * max((one[name] for one in points), default=0.0) for name in ("tpot_ms", "tokens_per_s")]
    for one in points:
        place = one["tpot_ms"], one["tokens_per_s"]
        is_near = all(abs(here - there) < size for here, there, size in zip(place, last, sizes, strict=True))
        if one["concurrency"] < APART * told or is_near:  # labels would lie on one another
            continue
        told, last = one["concurrency"], place
        axes.annotate(str(told), place, xytext=(5, -8), textcoords="offset points", fontsize=8)
    axes.margins(x=0.1)  # room for the last label
    axes.set_xlabel("ms a token (labels: sequences of a replica)")
    axes.set_ylabel("output tokens a second")
    axes.set_title(f"frontier, {plan['workload']['name']}")
    axes.grid(alpha=0.25)
