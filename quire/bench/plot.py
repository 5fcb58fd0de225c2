"""Draws a timeline: a PNG through matplotlib, or a self-contained HTML page with SVG that needs nothing."""

from __future__ import annotations

import html
import importlib.util
import pathlib
from collections.abc import Callable, Sequence

from quire.bench.timeline import Timeline
from quire.core.errors import ConfigError, shown
from quire.core.files import check_output, write_output

SUFFIXES = (".png", ".html")
WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 960, 220, 70, 50, 60
BLUE, ORANGE, GREEN = "#2563eb", "#ea580c", "#059669"
MAX_POINTS = 1_200


def check_plot_path(path: str) -> None:
    """ConfigError, before anything is measured, for a name that cannot be drawn to."""
    suffix = pathlib.Path(path).suffix
    if suffix not in SUFFIXES:
        raise ConfigError(f"--plot {shown(path)}: the name must end with {' or '.join(SUFFIXES)}")
    if suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot with .png needs matplotlib: pip install matplotlib, or write an .html")
    check_output(path, "--plot")


def write_drawing(path: str, write_png: Callable[[], None], page: Callable[[], str]) -> None:
    """Write what `path` ends with: a .png, or a page. ConfigError for a name that cannot be drawn to."""
    check_plot_path(path)
    try:
        if path.endswith(".png"):
            write_png()
        else:
            write_output(path, page())
    except OSError as error:
        raise ConfigError(f"--plot {shown(path)} cannot be written: {error.strerror}") from None


def write_plot(path: str, timeline: Timeline, title: str) -> None:
    """Draw running and waiting sequences above tokens, both against seconds. ConfigError as `write_drawing`."""
    shown_rows = timeline.from_zero().thinned(MAX_POINTS)
    write_drawing(path, lambda: _write_png(path, shown_rows, title), lambda: _html(shown_rows, title))


def _write_png(path: str, timeline: Timeline, title: str) -> None:
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(10, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.step(timeline.time_s, timeline.n_running, where="post", color=BLUE, label="running")
    upper.step(timeline.time_s, timeline.n_waiting, where="post", color=ORANGE, label="waiting")
    upper.set_ylabel("sequences")
    upper.set_title(title)
    lower.step(timeline.time_s, timeline.n_tokens, where="post", color=GREEN, label=timeline.unit)
    if any(timeline.n_prefill_tokens):
        lower.step(
            timeline.time_s, timeline.n_prefill_tokens, where="post", color=ORANGE, alpha=0.6, label="of these, prefill"
        )
    lower.set_ylabel(timeline.unit)
    lower.set_xlabel("seconds")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend()
    figure.savefig(path, dpi=120)


def _html(timeline: Timeline, title: str) -> str:
    lower = [(timeline.n_tokens, GREEN, timeline.unit)]
    if any(timeline.n_prefill_tokens):
        lower.append((timeline.n_prefill_tokens, ORANGE, "of these, prefill"))
    height = TOP + 2 * (PANEL_HEIGHT + GAP)
    upper = [(timeline.n_running, BLUE, "running"), (timeline.n_waiting, ORANGE, "waiting")]
    panels = _panel(timeline.time_s, TOP, upper) + _panel(timeline.time_s, TOP + PANEL_HEIGHT + GAP, lower)
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{LEFT}" y="22" font-size="15">{name}</text>\n'
        f"{panels}</svg></html>\n"
    )


Line = tuple[Sequence[float], str, str]
"""Values, colour, label."""


def _panel(times_s: Sequence[float], top: int, lines: Sequence[Line]) -> str:
    """Axes with five ticks each way, then one step line a column, then the legend."""
    right, bottom = WIDTH - 20, top + PANEL_HEIGHT
    end_s = max(times_s, default=0.0) or 1.0
    peak = max((max(values, default=0) for values, _, _ in lines), default=0) or 1
    parts = []
    for tick in range(5):
        x, y = LEFT + (right - LEFT) * tick / 4, bottom - PANEL_HEIGHT * tick / 4
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(peak * tick / 4)}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_number(end_s * tick / 4)} s</text>')
    for i, (values, colour, label) in enumerate(lines):
        points = "".join(
            f"{'H' if j else 'M'}{LEFT + (right - LEFT) * time_s / end_s:.1f}"
            f"{'V' if j else ' '}{bottom - PANEL_HEIGHT * value / peak:.1f}"
            for j, (time_s, value) in enumerate(zip(times_s, values, strict=True))
        )
        parts.append(f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x = LEFT + 10 + 190 * i
        parts.append(f'<path d="M{x} {top - 8}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 24}" y="{top - 4}">{html.escape(label)}</text>')
    return "\n".join(parts) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
