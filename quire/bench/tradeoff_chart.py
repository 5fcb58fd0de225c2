"""Draws quality against speed, a point for each variant: a PNG through matplotlib, or HTML with SVG."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import Final

from quire.bench.plot import BLUE, GREEN, LEFT, ORANGE, TOP, WIDTH, write_drawing
from quire.bench.tradeoffs import Row

COLOURS: Final = {
    "while loading": BLUE, "made": GREEN, "dense execution": ORANGE, "early exit": "#9333ea",
    "another model": "#475569",
}  # fmt: skip
HEIGHT: Final = 460

Point = tuple[float, float, str, str]
"""Speed, quality, label, colour."""


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One picture: of texts, or of tasks."""

    up: str
    points: list[Point]
    is_wide: bool = False
    """Qualities are some near 0 and some far: beyond 1 on a logarithmic scale."""


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Bits of the texts; and right replies, where there were tasks."""
    n = next(iter(rows[0].speed))
    more = [100 * (row.mean_bits / rows[0].mean_bits - 1) for row in rows]
    points = [(row.speed[n], bits, row.name, COLOURS[row.kind]) for row, bits in zip(rows, more, strict=True)]
    found = [Panel("bits per byte beyond those of the model as it is, % (less is better)", points, is_wide=True)]
    if rows[0].tasks:
        points = [(row.speed[n], 100 * row.accuracy, row.name, COLOURS[row.kind]) for row in rows]
        found.append(Panel("tasks answered right, % (more is better)", points))
    return found


def write_tradeoff_chart(path: str, rows: Sequence[Row], title: str) -> None:
    """ConfigError for a name that cannot be drawn to, see `write_drawing`."""
    across = f"speed beside the model as it is, {next(iter(rows[0].speed))} at once"
    drawn = panels(rows)
    write_drawing(path, lambda: _write_png(path, drawn, title, across), lambda: _html(drawn, title, across))


def _write_png(path: str, drawn: Sequence[Panel], title: str, across: str) -> None:
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(10, 6 * len(drawn)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        for speed, quality, label, colour in panel.points:
            axes.plot([speed], [quality], "o", color=colour)
            axes.annotate(label, (speed, quality), fontsize=7, xytext=(5, 3), textcoords="offset points")
        used = {point[3] for point in panel.points}
        for kind, colour in COLOURS.items():
            if colour in used:
                axes.plot([], [], "o", color=colour, label=kind)
        if panel.is_wide:
            axes.set_yscale("symlog", linthresh=1)
        axes.set_xlabel(across)
        axes.set_ylabel(panel.up)
        axes.grid(alpha=0.25)
        axes.legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _html(drawn: Sequence[Panel], title: str, across: str) -> str:
    name, bottom = html.escape(title), (TOP + HEIGHT + 60) * len(drawn)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="#fff"/><text x="{LEFT}" y="22" '
        f'font-size="15">{name}</text>\n'
        + "\n".join(_svg(panel, across, TOP + at * (TOP + HEIGHT + 60)) for at, panel in enumerate(drawn))
        + "</svg></html>\n"
    )


def _svg(panel: Panel, across: str, top: int) -> str:
    speeds, qualities = [point[0] for point in panel.points], [point[1] for point in panel.points]
    scaled = [math.asinh(quality) if panel.is_wide else quality for quality in qualities]
    right, bottom = WIDTH - 150, top + HEIGHT

    def part(value: float, values: Sequence[float]) -> float:
        low, high = min(values), max(values)
        return (value - low) / (high - low) if high > low else 0.5

    marks = []
    for (speed, _, label, colour), height in zip(panel.points, scaled, strict=True):
        x, y = LEFT + (right - LEFT) * part(speed, speeds), bottom - HEIGHT * part(height, scaled)
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        marks.append(f'<text x="{x + 6:.1f}" y="{y - 4:.1f}">{html.escape(label)}</text>')
    return (
        f'<path d="M{LEFT} {top}V{bottom}H{right}" fill="none" stroke="#888"/>'
        f'<text x="{LEFT}" y="{bottom + 36}">{across}: {min(speeds):.2f} to {max(speeds):.2f}</text>'
        f'<text x="{LEFT}" y="{top - 8}">{panel.up}: {min(qualities):.4g} to {max(qualities):.4g}</text>\n'
        + "\n".join(marks)
    )
