"""Pictures of simulations as PNG, through matplotlib: curves over rates, distributions, and those of the baselines."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from quire.bench.simulate.figures import gap_percentiles
from quire.bench.simulate.session import Point
from quire.core.errors import ConfigError
from quire.core.errors import shown as quoted

COLOURS: Final = ("#94a3b8", "#64748b", "#ea580c", "#d97706", "#2563eb", "#059669", "#7c3aed", "#db2777")
_BRIGHT_FIRST: Final = COLOURS[4:] + COLOURS[:4]
DPI: Final = 110
MAX_POINTS: Final = 1500
Axes = Any
"""Of matplotlib, which need not be there."""
GAP_SHARES: Final = tuple(100 * (1 - 10 ** (-i / 8)) for i in range(33))
"""Percentiles of gaps, ever closer to 100."""


def check_folder(path: str) -> None:
    """ConfigError, before anything is simulated, if pictures cannot be written there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    folder = pathlib.Path(path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--plot {quoted(path)} is a file: with --baselines give the name of a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot {quoted(path)} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--plot {quoted(path)} cannot be written: permission denied")


def write_curves(path: str, points: Sequence[Point]) -> None:
    """Throughput, first tokens, later tokens and the share within limits, each against the rate."""
    panels: list[tuple[str, str, bool]] = [
        ("request_throughput", "requests/s", False), ("p99_ttft_ms", "TTFT p99, ms", True),
        ("p99_tpot_ms", "TPOT p99, ms", True), ("slo_attainment", "share that keeps the SLO", False),
    ]  # fmt: skip
    panels = [panel for panel in panels if any(point.figures.get(panel[0]) is not None for point in points)]
    figure, axes = _figure(1, len(panels))
    for axis, (name, label, is_log) in zip(axes, panels, strict=True):
        for colour, (variant, own) in zip(
            itertools.cycle(COLOURS[4:] + COLOURS[:4]), _by_variant(points), strict=False
        ):
            pairs = [(point.rate, point.figures[name]) for point in own if point.figures.get(name) is not None]
            axis.plot(
                [rate for rate, _ in pairs],
                [value for _, value in pairs],
                marker="o",
                ms=3,
                color=colour,
                label=variant,
            )
        if is_log:
            _log(axis, "y")
        if name == "slo_attainment":
            axis.set_ylim(0, 1.03)
        _finish(axis, "requests/s that come", label)
    axes[0].legend(fontsize=7)
    _save(figure, path)


def write_distributions(path: str, points: Sequence[Point]) -> None:
    """How many requests have at most so long a TTFT, TPOT and total time, for each variant."""
    kinds: list[tuple[str, Callable[[Any], float | None]]] = [
        ("TTFT, ms", lambda one: one.ttft_s), ("TPOT, ms", lambda one: one.tpot_s), ("whole, ms", lambda one: one.e2e_s)
    ]  # fmt: skip
    figure, axes = _figure(1, len(kinds))
    for axis, (label, read) in zip(axes, kinds, strict=True):
        for point, colour in zip(points, _BRIGHT_FIRST * len(points), strict=False):
            found = [read(one) for one in point.run.outcomes if one.is_done]
            values = sorted(1000 * value for value in found if value is not None)
            axis.step(values, [(i + 1) / len(values) for i in range(len(values))], color=colour, label=point.variant)
        _log(axis, "x")
        _finish(axis, label, "share of requests")
    axes[0].legend(fontsize=7)
    _save(figure, path)


def write_baselines(folder: str, points: Sequence[Point], rate: float) -> None:
    """Four pictures: batches over time, what the cache is used for, throughput against latency, and stalls.

    rate: of these points, the one whose batches, cache and stalls are drawn.
    """
    at_rate = [point for point in points if point.rate == rate]
    place = pathlib.Path(folder)
    _write_batches(str(place / "batches.png"), at_rate)
    _write_kv(str(place / "kv.png"), at_rate)
    _write_frontier(str(place / "frontier.png"), points)
    _write_stalls(str(place / "stalls.png"), at_rate)


def _write_batches(path: str, points: Sequence[Point]) -> None:
    """Sequences that run and wait, of each variant, on one axis of time."""
    figure, axes = _figure(len(points), 1, height=1.15, width=8.0, sharex=True)
    for axis, point, colour in zip(axes, points, COLOURS, strict=False):
        line = point.run.logs[0].timeline.thinned(MAX_POINTS)
        axis.step(line.time_s, line.n_running, where="post", color=colour, lw=1)
        queue = axis.twinx()
        queue.step(line.time_s, line.n_waiting, where="post", color="#dc2626", lw=0.7, alpha=0.6)
        queue.tick_params(labelsize=7, colors="#dc2626")
        queue.set_ylim(0, 1.05 * max(1, *line.n_waiting))
        queue.yaxis.get_major_locator().set_params(integer=True)
        axis.set_title(f"{point.variant}: requests in the batch, and waiting (red)", fontsize=8, loc="left", pad=2)
        axis.set_ylim(bottom=0)
        _finish(axis, "", "")
    end_s = max(one.arrival_s for one in points[0].run.outcomes)
    axes[-1].set_xlim(0, min(2 * end_s, axes[-1].get_xlim()[1]))
    axes[-1].set_xlabel(f"seconds; {points[0].rate:g} requests/s come", fontsize=8)
    _save(figure, path)


def _write_kv(path: str, points: Sequence[Point]) -> None:
    """Left: of what is taken of the cache, the share that holds a token. Right: tokens held and taken over time."""
    figure, axes = _figure(1, 2, width=5.0, height=3.0)
    names = [point.variant for point in points]
    waste = [100 * float(point.figures["kv_waste"] or 0.0) for point in points]
    axes[0].barh(names, [100 - value for value in waste], color="#059669", label="tokens")
    axes[0].barh(names, waste, left=[100 - value for value in waste], color="#fca5a5", label="wasted")
    for i, value in enumerate(waste):
        axes[0].text(99, i, f"{value:.1f} %", ha="right", va="center", fontsize=8)
    axes[0].invert_yaxis()
    _finish(axes[0], "percent of the cache that is taken", "")
    axes[0].legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    for point, colour in zip(points, COLOURS, strict=False):
        line = point.run.logs[0].kv_line
        line = line[:: -(-len(line) // MAX_POINTS) or 1]
        axes[1].plot(
            [time_s for time_s, *_ in line], [taken for *_, taken in line], color=colour, lw=1, label=point.variant
        )
    _log(axes[1], "y")
    _finish(axes[1], "seconds", "token slots taken")
    axes[1].legend(fontsize=7)
    _save(figure, path)


def _write_frontier(path: str, points: Sequence[Point]) -> None:
    """Requests done a second against the time that they take."""
    figure, axes = _figure(1, 2, width=4.6, height=3.2)
    panels = (("p50_e2e_ms", "whole, p50, seconds"), ("p99_ttft_ms", "TTFT p99, seconds"))
    for axis, (name, label) in zip(axes, panels, strict=True):
        for (variant, own), colour in zip(_by_variant(points), COLOURS, strict=False):
            axis.plot(
                [point.figures["request_throughput"] for point in own],
                [1e-3 * float(point.figures[name] or 0.0) for point in own],
                marker="o", ms=3, lw=1, color=colour, label=variant,
            )  # fmt: skip
        _log(axis, "y")
        _finish(axis, "requests done a second", label)
    axes[0].legend(fontsize=7)
    _save(figure, path)


def _write_stalls(path: str, points: Sequence[Point]) -> None:
    """The longest gaps between two tokens: how many are longer than so much."""
    figure, axes = _figure(1, 1, width=6.5, height=3.2)
    for point, colour in zip(points, COLOURS, strict=False):
        found: Mapping[float, float] = gap_percentiles(point.run.logs, GAP_SHARES)
        axes[0].plot(
            [1000 * gap_s for gap_s in found.values()], [1 - share / 100 for share in found], color=colour,
            label=point.variant,
        )  # fmt: skip
    _log(axes[0], "x")
    _log(axes[0], "y")
    _finish(axes[0], "ms between two tokens of a sequence", "share of gaps that are longer")
    axes[0].legend(fontsize=7)
    _save(figure, path)


def _by_variant(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    return [(name, list(own)) for name, own in itertools.groupby(points, lambda point: point.variant)]


def _figure(
    n_rows: int, n_columns: int, width: float = 3.6, height: float = 3.0, **options: Any
) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    figure = Figure(figsize=(width * n_columns, height * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False, **options)
    return figure, [axis for row in axes for axis in row]


def _log(axis: Axes, name: Literal["x", "y"]) -> None:
    """Logarithmic, with numbers as people write them."""
    from matplotlib.ticker import LogFormatter

    axis.set(**{f"{name}scale": "log"})
    ticks = axis.xaxis if name == "x" else axis.yaxis
    ticks.set_major_formatter("{x:,.10g}")
    ticks.set_minor_formatter(LogFormatter())


def _finish(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(which="both", labelsize=7)
    axis.grid(alpha=0.25)


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ConfigError(f"--plot {quoted(path)} cannot be written: {error.strerror}") from None
