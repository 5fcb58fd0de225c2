"""Tables for people: one run, a curve over rates, variants side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from quire.bench.simulate.session import Figures, Point

CURVE: Final = (
    ("request_throughput", "req/s"), ("output_throughput", "tok/s"), ("goodput", "goodput"), ("slo_attainment", "kept"),
    ("p50_ttft_ms", "TTFT p50"), ("p99_ttft_ms", "p99 ms"), ("p50_tpot_ms", "TPOT p50"), ("p99_tpot_ms", "p99 ms"),
    ("p99_itl_ms", "gap p99"), ("mean_kv_use", "KV use"), ("kv_waste", "waste"), ("mean_waiting", "queue"),
)  # fmt: skip
"""Figures of a curve's rows, and their heads."""


def shown(value: float | int | None) -> str:
    """A figure, in about four digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-" if value is None or math.isnan(value) else "inf"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def one(title: str, values: Figures) -> Iterator[str]:
    """A figure a line."""
    yield f"{title:=^60}"
    for name, value in values.items():
        yield f"{name:<36}{shown(value):>24}"


def side_by_side(columns: Mapping[str, Figures]) -> Iterator[str]:
    """A figure a line, a variant a column; behind each but the first, its change in percent."""
    first, *others = columns
    widths = {name: max(12, len(name)) for name in columns}
    head = f"{'':<24}{first:>{widths[first]}}" + "".join(f"  {name:>{widths[name]}}        " for name in others)
    yield head.rstrip()
    for name, value in columns[first].items():
        line = f"{name:<24}{shown(value):>{widths[first]}}"
        for other in others:
            line += (
                f"  {shown(columns[other].get(name)):>{widths[other]}} {_change(value, columns[other].get(name)):>7}"
            )
        yield line.rstrip()


def curve(points: Sequence[Point]) -> Iterator[str]:
    """A line for each variant and rate."""
    names = [name for name, _ in CURVE if any(point.figures.get(name) is not None for point in points)]
    heads, width = dict(CURVE), max(12, *(len(point.variant) for point in points))
    yield f"{'':<{width}} {'rate':>8}" + "".join(f" {heads[name]:>9}" for name in names)
    for point in points:
        rate = "as given" if point.rate is None else shown(point.rate)
        values = "".join(f" {shown(point.figures.get(name)):>9}" for name in names)
        yield f"{point.variant:<{width}} {rate:>8}{values}"


def refusals(points: Sequence[Point]) -> Iterator[str]:
    """A line for each reason: how many requests, of how many runs, and the first of them in words."""
    found: dict[str, list[list[str]]] = {}
    for point in points:
        for code, reasons in point.refusals.items():
            found.setdefault(code, []).append(reasons)
    n_all = sum(len(point.run.outcomes) for point in points)
    for code, runs in found.items():
        where = f" in {len(runs)} of {len(points)} runs" if len(points) > 1 else ""
        yield f"refused: {sum(map(len, runs)):,} of {n_all:,}{where}, {code}; the first: {runs[0][0]}"


def _change(before: float | int | None, after: float | int | None) -> str:
    if before is None or after is None or not before:
        return ""
    return f"{100 * (after / before - 1):+.1f}%"
