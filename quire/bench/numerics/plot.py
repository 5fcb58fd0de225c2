"""Draws mean differences over lengths, both logarithmic: a PNG through matplotlib, or HTML with SVG that needs nothing.

Owns panels and lines. A line that is 0 or not finite somewhere has no point there.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import Final

from quire.bench.numerics.deviation import Row
from quire.bench.plot import BLUE, GREEN, LEFT, ORANGE, PANEL_HEIGHT, TOP, WIDTH, check_plot_path
from quire.core.errors import ConfigError, shown
from quire.core.files import write_output

COLOURS: Final = (
    ORANGE, "#b91c1c", "#ef4444", "#fca5a5", "#6b7280", BLUE, "#60a5fa", "#1e3a8a", "#0891b2", "#67e8f9", GREEN,
    "#9333ea", "#a3e635", "#ec4899", "#78350f", "#111827",
)  # fmt: skip
LEGEND: Final = 250
"""Pixels at the right of a panel."""
GAP: Final = 70
LINE: Final = 15


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """Lines of one block of the table."""

    title: str
    lines: dict[str, list[tuple[int, float]]]
    """Label → (length, mean difference), ascending."""


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each part, input and type that has more than one length; if none has, for all of them."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        mean = row.deviation.mean_abs
        if mean > 0 and math.isfinite(mean):
            lines = found.setdefault(f"{row.part}, {row.inputs}, {row.dtype}", {})
            lines.setdefault(f"{row.path} ({row.tile})", []).append((row.length, mean))
    made = [Panel(title, {label: sorted(points) for label, points in lines.items()}) for title, lines in found.items()]
    several = [panel for panel in made if any(len(points) > 1 for points in panel.lines.values())]
    return several or made


def write_numerics_plot(path: str, rows: Sequence[Row], title: str) -> None:
    """Draw all panels. ConfigError for a name that cannot be drawn to, see `check_plot_path`."""
    check_plot_path(path)
    drawn = panels(rows)
    try:
        if path.endswith(".png"):
            _write_png(path, drawn, title)
        else:
            write_output(path, _html(drawn, title))
    except OSError as error:
        raise ConfigError(f"--plot {shown(path)} cannot be written: {error.strerror}") from None


def _write_png(path: str, drawn: Sequence[Panel], title: str) -> None:
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(10, 1 + 3.5 * max(1, len(drawn))), layout="constrained")
    for axes, panel in zip(figure.subplots(max(1, len(drawn)), 1, squeeze=False)[:, 0], drawn, strict=False):
        for i, (label, points) in enumerate(panel.lines.items()):
            axes.loglog(*zip(*points, strict=True), marker="o", color=COLOURS[i % len(COLOURS)], label=label)
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
    points = [point for line in panel.lines.values() for point in line]
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
    for i, (label, line) in enumerate(panel.lines.items()):
        colour, at = COLOURS[i % len(COLOURS)], top + 6 + LINE * i
        path = "L".join(f"{x(n):.1f} {y(mean):.1f}" for n, mean in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x(n):.1f}" cy="{y(mean):.1f}" r="2.5" fill="{colour}"/>' for n, mean in line]
        parts.append(f'<path d="M{right + 20} {at}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{right + 44}" y="{at + 4}">{html.escape(label)}</text>')
    return "\n".join(parts) + "\n"
