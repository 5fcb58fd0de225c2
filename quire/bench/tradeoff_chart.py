"""Draws quality against speed, a point for each variant: a PNG through matplotlib, or HTML with SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from quire.bench.plot import BLUE, GREEN, LEFT, ORANGE, TOP, WIDTH, check_plot_path
from quire.bench.tradeoffs import Row
from quire.core.errors import ConfigError, shown
from quire.core.files import write_output

COLOURS: Final = {"while loading": BLUE, "made": GREEN, "dense execution": ORANGE}
HEIGHT: Final = 460
ACROSS, UP = "tokens a second", "bits per byte, mean of the texts (less is better)"


def write_tradeoff_chart(path: str, rows: Sequence[Row], title: str) -> None:
    """ConfigError for a name that cannot be drawn to, see `check_plot_path`."""
    check_plot_path(path)
    n = next(iter(rows[0].tokens_per_second))
    points = [(row.tokens_per_second[n], row.mean_bits, row.name, COLOURS[row.kind]) for row in rows]
    across = f"{ACROSS}, {n} at once"
    try:
        if path.endswith(".png"):
            _write_png(path, points, title, across)
        else:
            write_output(path, _html(points, title, across))
    except OSError as error:
        raise ConfigError(f"--plot {shown(path)} cannot be written: {error.strerror}") from None


Point = tuple[float, float, str, str]
"""Speed, bits, label, colour."""


def _write_png(path: str, points: Sequence[Point], title: str, across: str) -> None:
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for speed, bits, label, colour in points:
        axes.plot([speed], [bits], "o", color=colour)
        axes.annotate(label, (speed, bits), fontsize=7, xytext=(5, 3), textcoords="offset points")
    for kind, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=kind)
    axes.set_xlabel(across)
    axes.set_ylabel(UP)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=110)


def _html(points: Sequence[Point], title: str, across: str) -> str:
    speeds, bits = [point[0] for point in points], [point[1] for point in points]
    right, bottom = WIDTH - 150, TOP + HEIGHT

    def part(value: float, values: Sequence[float]) -> float:
        low, high = min(values), max(values)
        return (value - low) / (high - low) if high > low else 0.5

    marks = []
    for speed, bit, label, colour in points:
        x, y = LEFT + (right - LEFT) * part(speed, speeds), bottom - HEIGHT * part(bit, bits)
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        marks.append(f'<text x="{x + 6:.1f}" y="{y - 4:.1f}">{html.escape(label)}</text>')
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 60}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="#fff"/><text x="{LEFT}" y="22" '
        f'font-size="15">{name}</text>\n<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#888"/>'
        f'<text x="{LEFT}" y="{bottom + 36}">{across}: {min(speeds):,.0f} to {max(speeds):,.0f}</text>'
        f'<text x="{LEFT}" y="{TOP - 8}">{UP}: {min(bits):.4f} to {max(bits):.4f}</text>\n'
        + "\n".join(marks)
        + "</svg></html>\n"
    )
