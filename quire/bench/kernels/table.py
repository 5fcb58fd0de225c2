"""The results for people, as lines of text, and for a report, as plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from quire.bench.kernels.limits import DeviceLimits
from quire.bench.kernels.measurement import NOT_CHECKED, RIGHT, Accuracy, Results, Timing

FEW = 12
"""Checks of an implementation that are listed one by one."""
CASE = 52
"""Characters of the first column."""
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def lines(results: Results) -> Iterator[str]:
    """The whole table."""
    yield from limit_lines(results.limits)
    if results.accuracies:
        yield f"{'Errors against float64 ':=<{CASE + 72}}"
        yield from accuracy_lines(results.accuracies)
    if results.timings:
        yield f"{'Times ':=<{CASE + 72}}"
        head = f"{'case':<{CASE}}{'implementation':<24}{'time':>10}{'±':>7}{'rate':>15}{'limit':>8}{'share':>7}  ratio"
        yield head
    shown_op = ""
    for row in results.timings:
        if row.op != shown_op:
            shown_op = row.op
            yield shown_op
        yield timing_line(row)
    yield from results.notes
    n_unchecked = sum(row.checked == NOT_CHECKED for row in results.timings)
    if n_unchecked:
        yield f"{n_unchecked} times are of implementations whose results no check of their kind has compared"
    if results.left_out:
        yield f"{len(results.left_out)} cases were not measured: no time was left (--time-limit 0 measures all)"


def limit_lines(limits: DeviceLimits) -> Iterator[str]:
    """Ceilings of the device."""
    yield (
        f"Limits measured in this run: read {rate(limits.read_bytes_s, 'B/s')}, copy {rate(limits.copy_bytes_s, 'B/s')}"
        f" (read + written), matmul of {limits.matrix} {rate(limits.flops_s, 'FLOP/s')}"
    )


def accuracy_lines(rows: Sequence[Accuracy]) -> Iterator[str]:
    """Each check; of many of one implementation those that are bad, how many there are, and the worst of the others."""
    of_each: dict[tuple[str, str], list[Accuracy]] = {}
    for row in rows:
        of_each.setdefault((row.op, row.implementation), []).append(row)
    for found in of_each.values():
        if len(found) <= FEW:
            yield from map(accuracy_line, found)
            continue
        yield from (accuracy_line(row) for row in found if row.bad)
        good, refused = [row for row in found if row.good], [row for row in found if row.note]
        what = _cell(found[0].op, CASE) + _cell(found[0].implementation, 24)
        if good:
            worst = max(good, key=lambda row: row.error / row.tolerance)
            yield f"{what}{len(good)} of {len(found)} are right, the worst: {_error(worst)}, {worst.check}"
        if refused:
            yield f"{what}{len(refused)} of {len(found)} not checked, the first: {refused[0].check}: {refused[0].note}"


def accuracy_line(row: Accuracy) -> str:
    """One check."""
    what = _cell(f"{row.op} {row.check}", CASE) + _cell(row.implementation, 24)
    if row.failure or row.note:
        return f"{what}{'FAILED: ' + row.failure if row.failure else 'not checked: ' + row.note}"
    return f"{what}{_error(row)}{'' if row.good else '  WRONG'}"


def _cell(text: str, width: int) -> str:
    """Of a column, apart from the next one also where the text is wider."""
    return f"{text:<{width - 2}}  "


def _error(row: Accuracy) -> str:
    return f"{row.error:.1e} of {row.tolerance:.1e} allowed"


def timing_line(row: Timing) -> str:
    """One contender; peers have no share in the exit code and are set apart by a dot."""
    what = _cell(f"  {row.case}", CASE) + _cell(("· " if row.is_peer else "") + row.implementation, 24)
    if row.error or row.note:
        return f"{what}{'FAILED: ' + row.error if row.error else 'not run: ' + row.note}"
    text = f"{what}{_time(row.time_s):>10}{row.spread:>7.0%}"
    if not math.isnan(row.share):
        speed = rate(row.flops_s, "FLOP/s") if row.in_flops else rate(row.bytes_s, "B/s")
        text += f"{speed:>15}{row.bound:>8}{row.share:>7.0%}"
        if row.ratio_to and not math.isnan(row.ratio):
            text += f"  {row.ratio:.2f} x {row.ratio_to}"
    return text if row.checked in ("", RIGHT) else f"{text}  {row.checked.upper()}"


def rate(value: float, unit: str) -> str:
    """`4.26 TB/s`."""
    size, letter = next(((size, letter) for size, letter in UNITS if value >= size), UNITS[-1])
    return f"{value / size:.3g} {letter}{unit}" if value < 100 * size else f"{value / size:.0f} {letter}{unit}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def values(results: Results) -> dict[str, object]:
    """For a report."""
    return {
        "limits": dataclasses.asdict(results.limits),
        "errors": [dataclasses.asdict(row) | {"good": None if row.note else row.good} for row in results.accuracies],
        "times": [dataclasses.asdict(row) for row in results.timings],
        "not_measured": results.left_out,
        "notes": results.notes,
    }
