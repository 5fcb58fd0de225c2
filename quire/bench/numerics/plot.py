"""Draws mean differences over lengths, both logarithmic: a PNG through matplotlib, or HTML with SVG that needs nothing.

Owns panels and lines. A line that is 0 or not finite somewhere has no point there.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import Final

from quire.bench.numerics.deviation import BASELINE, FLASH, OURS, PEER, ROUNDED, Row
from quire.bench.plot import BLUE, GREEN, LEFT, ORANGE, PANEL_HEIGHT, TOP, WIDTH, write_drawing

COLOURS: Final = {
    BASELINE: (ORANGE,),
    FLASH: ("#7f1d1d", "#dc2626", "#f87171", "#fca5a5"),
    PEER: ("#6b7280",),
    OURS: (BLUE, "#60a5fa", "#1e3a8a", "#0891b2", "#67e8f9", "#9333ea", "#c4b5fd", "#4f46e5"),
    ROUNDED: (GREEN, "#84cc16", "#14532d", "#a3e635"),
}
"""Kind of a path → colours of its lines."""
LEGEND: Final = 250
"""Pixels at the right of a panel."""
GAP: Final = 70
LINE: Final = 15
"""Of the legend."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One path."""

    label: str
    colour: str
    points: list[tuple[int, float]]
    """(length, mean difference), ascending."""


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """A block of the table."""

    title: str
    lines: list[Line]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """One for each part, input and type that has a point; those of one length are left out where others have more."""
    found: dict[str, dict[tuple[str, str], list[tuple[int, float]]]] = {}
    for row in rows:
        mean = row.deviation.mean_abs
        if mean > 0 and math.isfinite(mean):
            lines = found.setdefault(f"{row.part}, {row.inputs}, {row.dtype}", {})
            lines.setdefault((row.kind, f"{row.path} ({row.tile})"), []).append((row.length, mean))
    made = [Panel(title, _coloured(lines)) for title, lines in found.items()]
    several = [panel for panel in made if any(len(line.points) > 1 for line in panel.lines)]
    return several or made


def _coloured(lines: dict[tuple[str, str], list[tuple[int, float]]]) -> list[Line]:
    """Kinds side by side, each in shades of its colour."""
    made = []
    for kind, shades in COLOURS.items():
        labels = [label for of, label in lines if of == kind]
        made += [Line(label, shades[i % len(shades)], sorted(lines[kind, label])) for i, label in enumerate(labels)]
    return made


def write_numerics_plot(path: str, rows: Sequence[Row], title: str) -> None:
    """Draw all panels. ConfigError for a name that cannot be drawn to, see `write_drawing`."""
    drawn = panels(rows)
    write_drawing(path, lambda: _write_png(path, drawn, title), lambda: _html(drawn, title))


def _write_png(path: str, drawn: Sequence[Panel], title: str) -> None:
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(10, 1 + 3.5 * max(1, len(drawn))), layout="constrained")
    for axes, panel in zip(figure.subplots(max(1, len(drawn)), 1, squeeze=False)[:, 0], drawn, strict=False):
        for line in panel.lines:
            axes.loglog(*zip(*line.points, strict=True), marker="o", color=line.colour, label=line.label)
        lengths = sorted({n for line in panel.lines for n, _ in line.points})
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.set_ylabel("mean |difference|")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.supxlabel("tokens")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _html(drawn: Sequence[Panel], title: str) -> str:
    top, parts, name = TOP, [], html.escape(title)
    for panel in drawn:
        parts.append(_panel(panel, top))
        top += max(PANEL_HEIGHT, LINE * len(panel.lines)) + GAP
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEGEND} {top}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{LEFT}" y="22" font-size="15">{name}</text>\n'
        f"{''.join(parts)}</svg></html>\n"
    )


def _panel(panel: Panel, top: int) -> str:
    """Axes with a tick for each length and power of ten, a line a path, the legend beside it."""
    right, bottom = WIDTH - 60, top + PANEL_HEIGHT
    points = [point for line in panel.lines for point in line.points]
    lengths = sorted({n for n, _ in points})
    low, high = (math.log10(f(mean for _, mean in points)) for f in (min, max))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    first, last = math.log(lengths[0]), math.log(max(lengths[-1], lengths[0] + 1))

    def x(n: int) -> float:
        return LEFT + (right - LEFT) * (math.log(n) - first) / (last - first)

    def y(mean: float) -> float:
        return bottom - PANEL_HEIGHT * (math.log10(mean) - low) / (high - low)

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{html.escape(panel.title)}: mean |difference|</text>']
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    parts += [f'<text x="{x(n):.1f}" y="{bottom + 18}" text-anchor="middle">{n:,}</text>' for n in lengths]
    for i, line in enumerate(panel.lines):
        colour, at = line.colour, top + 6 + LINE * i
        path = "L".join(f"{x(n):.1f} {y(mean):.1f}" for n, mean in line.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x(n):.1f}" cy="{y(mean):.1f}" r="2.5" fill="{colour}"/>' for n, mean in line.points]
        parts.append(f'<path d="M{right + 20} {at}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{right + 44}" y="{at + 4}">{html.escape(line.label)}</text>')
    return "\n".join(parts) + "\n"
