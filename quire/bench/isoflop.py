"""Draws loss over model size for several budgets: a PNG through matplotlib, or HTML with SVG that needs nothing.

Owns the picture. Does not own the curves (`planner/scaling/optimum`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

from quire.bench.plot import BLUE, GREEN, LEFT, ORANGE, TOP, WIDTH, write_drawing
from quire.core.counts import format_count
from quire.planner.scaling.optimum import Curve

COLOURS: Final = (BLUE, ORANGE, GREEN, "#9333ea", "#0891b2", "#6b7280", "#dc2626")
HEIGHT: Final = 420
LEGEND: Final = 150


def write_isoflop_plot(path: str, curves: Sequence[Curve], title: str) -> None:
    """Each budget a line, its best model a point. ConfigError for a name that cannot be drawn to."""
    write_drawing(path, lambda: _write_png(path, curves, title), lambda: _html(curves, title))


def _label(curve: Curve) -> str:
    return f"{curve.flops:.0e} FLOPs: {format_count(curve.best.n_parameters)}"


def _write_png(path: str, curves: Sequence[Curve], title: str) -> None:
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for i, curve in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        axes.semilogx(curve.n_parameters, curve.losses, color=colour, label=_label(curve))
        axes.plot([curve.best.n_parameters], [curve.best_loss], "o", color=colour)
    axes.set_xlabel("parameters")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _html(curves: Sequence[Curve], title: str) -> str:
    name, bottom, right = html.escape(title), TOP + HEIGHT, WIDTH - 20
    sizes = [math.log10(n) for curve in curves for n in curve.n_parameters]
    losses = [loss for curve in curves for loss in curve.losses]
    first, last = math.floor(min(sizes)), math.ceil(max(sizes))
    low, high = min(losses), max(losses)

    def x(size: float) -> float:
        return LEFT + (right - LEFT) * (math.log10(size) - first) / (last - first)

    def y(loss: float) -> float:
        return bottom - HEIGHT * (loss - low) / (high - low)

    parts = []
    for power in range(first, last + 1):
        at = x(10.0**power)
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{format_count(10.0**power)}</text>')
    for tick in range(6):
        loss = low + (high - low) * tick / 5
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    for i, curve in enumerate(curves):
        colour, at = COLOURS[i % len(COLOURS)], TOP + 16 + 16 * i
        pairs = zip(curve.n_parameters, curve.losses, strict=True)
        path = "L".join(f"{x(size):.1f} {y(loss):.1f}" for size, loss in pairs)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        centre = f'cx="{x(curve.best.n_parameters):.1f}" cy="{y(curve.best_loss):.1f}"'
        parts.append(f'<circle {centre} r="3.5" fill="{colour}"/>')
        parts.append(f'<path d="M{right + 10} {at}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{right + 32}" y="{at + 4}">{html.escape(_label(curve))}</text>')
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEGEND} {bottom + 40}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{LEFT}" y="22" font-size="15">{name}</text>\n'
        f'<text x="{right}" y="{bottom + 34}" text-anchor="end">parameters; up: loss, nats a token</text>\n'
        f"{chr(10).join(parts)}</svg></html>\n"
    )
