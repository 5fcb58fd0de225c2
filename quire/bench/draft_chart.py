"""Draws what drafts bring: expected tokens and speed-up over their number and cost, for some chances, with measured
points.

Theory: Leviathan et al. 2023, section 3. With the chance α of a draft, γ drafts and a draft's cost of c plain steps, a
step keeps (1 - α^(γ+1)) / (1 - α) tokens in the time of γc + 1 plain steps, where verifying many rows costs what one
does; here it costs what was measured. A PNG through matplotlib, or HTML with SVG that needs nothing.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.bench.plot import BLUE, GREEN, LEFT, ORANGE, PANEL_HEIGHT, TOP, WIDTH, write_drawing
from quire.planner.drafts import DraftCosts, expected_tokens

CHANCES: Final = {0.5: "#94a3b8", 0.7: GREEN, 0.8: BLUE, 0.9: "#9333ea", 0.95: "#dc2626"}
"""α → colour of its line."""
MOST: Final = 12
"""Drafts at the right end."""
COSTS: Final = [n / 40 for n in range(21)]
"""Of a draft, in plain steps: c."""
GAP: Final = 70


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    over: str
    """What its horizontal axis is."""
    numbers: Sequence[float]
    """On that, rising from 0."""
    lines: dict[float, list[float]]
    """α → values for `numbers`."""
    points: list[tuple[float, float, str]]
    """(number, value, label), measured."""


def panels(rows: Sequence[Mapping[str, Any]], costs: DraftCosts | None) -> list[Panel]:
    """Expected tokens; and speed-up, where costs are known: over drafts as measured, and over c the most that there is
    for one sequence and any number of drafts. rows: of `bench speculate`."""
    numbers = range(MOST + 1)
    tokens = {rate: [expected_tokens(rate, n) for n in numbers] for rate in CHANCES}
    labels = [f"batch {row['batch_size']}, α {row['acceptance']:.2f}" for row in rows]
    drafts = [min(float(row["drafts_per_span"]), float(MOST)) for row in rows]
    kept = [(n, 1 + row["accepted_per_span"], label) for n, row, label in zip(drafts, rows, labels, strict=True)]
    found = [Panel("tokens that a step keeps", "drafts", numbers, tokens, kept)]
    if costs is not None:
        plain_s = costs.seconds(1)
        step_s = [costs.seconds(1 + n) + costs.guesses_s([n]) + (costs.exposed(1) if n else 0) for n in numbers]
        speed = {rate: [one * plain_s / s for one, s in zip(tokens[rate], step_s, strict=True)] for rate in CHANCES}
        points = [(n, float(row["speedup"]), label) for n, row, label in zip(drafts, rows, labels, strict=True)]
        c = costs.guesses_s([1]) / plain_s
        found.append(Panel(f"speed-up of one sequence, c = {c:.2f}", "drafts", numbers, speed, points))
        most = {rate: [_most_speed(values, cost) for cost in COSTS] for rate, values in tokens.items()}
        alone = [
            (min(c, COSTS[-1]), speedup, label)
            for row, (_, speedup, label) in zip(rows, points, strict=True)
            if row["batch_size"] == 1
        ]
        title = "most speed-up of one sequence, where verifying rows costs what one does"
        found.append(Panel(title, "c, the cost of a draft in plain steps", COSTS, most, alone))
    return found


def _most_speed(tokens: Sequence[float], cost: float) -> float:
    """Of any number of drafts, each so many plain steps. tokens: that a step keeps with 0, 1, ... drafts."""
    return max(kept / (n * cost + 1) for n, kept in enumerate(tokens))


def write_draft_chart(path: str, drawn: Sequence[Panel], title: str) -> None:
    """ConfigError for a name that cannot be drawn to, see `write_drawing`."""
    write_drawing(path, lambda: _write_png(path, drawn, title), lambda: _html(drawn, title))


def _write_png(path: str, drawn: Sequence[Panel], title: str) -> None:
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(10, 4 * len(drawn)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(drawn), 1, squeeze=False)[:, 0], drawn, strict=True):
        for rate, values in panel.lines.items():
            axes.plot(panel.numbers, values, color=CHANCES[rate], label=f"α {rate}")
        for n, value, label in panel.points:
            axes.plot([n], [value], "o", color=ORANGE)
            axes.annotate(label, (n, value), fontsize=7)
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.set_xlabel(panel.over, fontsize=8)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _html(drawn: Sequence[Panel], title: str) -> str:
    name, height = html.escape(title), TOP + len(drawn) * (PANEL_HEIGHT + GAP)
    parts = [_panel(panel, TOP + i * (PANEL_HEIGHT + GAP)) for i, panel in enumerate(drawn)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LEFT}" y="22" font-size="15">{name}</text>\n{"".join(parts)}</svg></html>\n'
    )


def _panel(panel: Panel, top: int) -> str:
    right, bottom, last = WIDTH - 90, top + PANEL_HEIGHT, panel.numbers[-1]
    peak = max([value for values in panel.lines.values() for value in values] + [value for _, value, _ in panel.points])

    def at(n: float, value: float) -> str:
        return f"{LEFT + (right - LEFT) * n / last:.1f} {bottom - PANEL_HEIGHT * value / peak:.1f}"

    parts = [
        f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{html.escape(f"{panel.title}; over {panel.over}")}</text>'
    ]
    for tick in range(5):
        y = bottom - PANEL_HEIGHT * tick / 4
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{peak * tick / 4:.1f}</text>')
    for n in panel.numbers[:: (len(panel.numbers) - 1) // 5]:
        x = LEFT + (right - LEFT) * n / last
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{n:g}</text>')
    for rate, values in panel.lines.items():
        path = "L".join(at(n, value) for n, value in zip(panel.numbers, values, strict=True))
        parts.append(f'<path d="M{path}" fill="none" stroke="{CHANCES[rate]}" stroke-width="1.5"/>')
        y = bottom - PANEL_HEIGHT * values[-1] / peak
        parts.append(f'<text x="{right + 8}" y="{y + 4:.1f}" fill="{CHANCES[rate]}">α {rate}</text>')
    for number, value, label in panel.points:
        place = at(number, value).split()
        parts.append(f'<circle cx="{place[0]}" cy="{place[1]}" r="4" fill="{ORANGE}"/>')
        parts.append(f'<text x="{place[0]}" y="{place[1]}" dx="7" dy="-5">{html.escape(label)}</text>')
    return "\n".join(parts) + "\n"
