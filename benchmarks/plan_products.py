"""A format's curve of products, of kernels timed by rows (`product_rows`): kernels_products.json is all that is read.

An engine takes as long as its kernels alone where these read memory. From `MANY_ROWS` on the chip comes to its power
limit when products go on: none reaches a higher rate then than bfloat16's in an engine, whose curve is fitted to whole
steps; one that is slower alone loses nothing. Of each number of rows a line through the matrices of a layer tells fixed
costs from those of size.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from typing import Any, Final

import msgspec
import numpy

from quire.planner.calibration import SHARPNESS, Calibration, Curve
from quire.planner.formats import FORMATS, WeightFormat

FILE: Final = pathlib.Path(__file__).with_name("results") / "h200" / "kernels_products.json"
FORMS: Final = {"g128": "int4-g128", "fp8 channels": "fp8"}
"""A form of the file → the format of the planner."""
PLAIN, ALONE = "bfloat16", "bf16"
"""The format, and its form of the file."""
FEW_ROWS, MANY_ROWS = 128, 512
"""Up to two tiles, and from where on arithmetic binds any format's products."""
SUSTAINED_ROWS = 1024
"""A step of so many sequences goes on for long; with more rows it has prompts, whose rate whole steps tell."""
GOING_ON: Final = {"fp8": 1300 / 723, "int8": 1.0}
"""Rates of products that go on, to bfloat16's: 8,192 rows by channels, 8,192 x 8,192 (docs/lab-notes.md). Codes of 4
bits are multiplied as bfloat16."""
Sizes = tuple[int, int]
"""(outputs, inputs) of a matrix."""
Times = dict[int, dict[Sizes, float]]
"""Rows → matrix → seconds."""


def times_of(report: dict[str, Any], form: str) -> Times:
    """Of one form; empty: it was not timed."""
    found: Times = {}
    for row in report["rows"]:
        if row["form"] == form:
            found.setdefault(row["rows"], {})[row["n"], row["k"]] = 1e-6 * row["us"]
    return dict(sorted(found.items()))


def seconds(curve: Curve, weights: WeightFormat, sizes: Sizes, n_rows: int, calibration: Calibration) -> float:
    """One product, as `StepTimer.product_s` has it."""
    memory_s, arithmetic_s = parts(curve, weights, sizes, n_rows, calibration)
    joined_s = (memory_s**SHARPNESS + arithmetic_s**SHARPNESS) ** (1 / SHARPNESS)
    return curve.fixed(n_rows) + sum(sizes) * n_rows * curve.row_number_s + float(joined_s)


def parts(
    curve: Curve, weights: WeightFormat, sizes: Sizes, n_rows: int, calibration: Calibration
) -> tuple[float, float]:
    """Seconds of memory and of arithmetic."""
    n_out, n_in = sizes
    n_bytes = weights.n_bytes(n_out, n_in) + 2 * (n_out + n_in) * n_rows
    n_flops = 2.0 * n_out * n_in * curve.multiplied(n_rows)
    rate = curve.rate_share(n_rows) * calibration.rate(weights.products)
    return n_bytes / (curve.bytes_share * calibration.read_bytes_per_s), n_flops / rate


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at 0, seconds of one) of least squares, neither below 0; their sum is that of the points."""
    sizes, times = (numpy.array(column) for column in zip(*points, strict=True))
    slope, fixed = numpy.polyfit(sizes, times, 1) if len(points) > 1 else (0.0, times[0])
    if fixed < 0:
        return 0.0, float(times.sum() / sizes.sum())
    return (float(fixed), float(slope)) if slope >= 0 else (float(times.mean()), 0.0)


def curve_of_times(times: Times, weights: WeightFormat, plain: Curve, calibration: Calibration) -> Curve:
    """times: as an engine has them. Reads are as fast as with the fewest rows; where products of more rows take longer
    than that, arithmetic binds, at the rate that is left for it. Fixed costs are those of the matrices that were timed
    with any number of rows; large ones tell rates. plain: bfloat16's, whose tiles there are, and whose shares of the
    device's reads and products are the most."""
    n_few, *_ = times
    _, byte_s = line([(weights.n_bytes(*sizes), s) for sizes, s in times[n_few].items()])
    most = max(plain.flops_share)
    bytes_share = min(plain.bytes_share, 1 / (byte_s * calibration.read_bytes_per_s))
    found = Curve(bytes_share=bytes_share, tile=plain.tile)
    fixed_s, shares = [], []
    for n_rows, measured in times.items():
        _, number_s = line([(n_out * n_in, s) for (n_out, n_in), s in measured.items()])
        memory_s, whole_s = (
            sum(parts(found, weights, sizes, n_rows, calibration)[i] for sizes in measured) for i in (0, 1)
        )
        grown_s = number_s * sum(n_out * n_in for n_out, n_in in measured)
        left_s = max(0.0, grown_s**SHARPNESS - memory_s**SHARPNESS) ** (1 / SHARPNESS)
        share = min(most, whole_s / left_s if left_s else most)
        here = msgspec.structs.replace(found, flops_share=(share,))
        known = [sizes for sizes in measured if all(sizes in one for one in times.values())]
        lacking = [measured[sizes] - seconds(here, weights, sizes, n_rows, calibration) for sizes in known]
        shares.append(float(share))
        fixed_s.append(max(0.0, sum(lacking) / len(lacking)))
    return msgspec.structs.replace(found, rows=tuple(times), fixed_s=tuple(fixed_s), flops_share=tuple(shares))


def engine_times(alone: Times, weights: WeightFormat, plain: Curve, calibration: Calibration) -> Times:
    """Of kernels that go on. plain: bfloat16's curve in an engine."""
    found = {}
    for n_rows, measured in alone.items():
        times = 1.0
        if n_rows >= MANY_ROWS:
            going_on_s = sum(seconds(plain, FORMATS[PLAIN], sizes, n_rows, calibration) for sizes in measured)
            times = max(1.0, going_on_s / GOING_ON[weights.products] / sum(measured.values()))
        found[n_rows] = {sizes: times * s for sizes, s in measured.items()}
    return found


def filled(
    plain: Curve, fitted: tuple[int, ...], calibration: Calibration, report: dict[str, Any] | None = None
) -> Curve:
    """bfloat16's, which whole steps tell at the rows of `fitted`, with what its kernel takes alone between `FEW_ROWS`
    and `SUSTAINED_ROWS`: at 128 and 256 rows that is within 1 % of what an engine takes, and from `MANY_ROWS` on it is
    made longer as it is where whole steps tell. Between them there is no line, as tiles fill the processors now well
    and now badly."""
    alone = times_of(json.loads(FILE.read_text()) if report is None else report, ALONE)
    between = {n: times for n, times in alone.items() if FEW_ROWS < n < SUSTAINED_ROWS and n not in fitted}
    ends = [n for n in (MANY_ROWS, SUSTAINED_ROWS) if n in alone]
    longer = [
        sum(seconds(plain, FORMATS[PLAIN], one, n, calibration) for one in alone[n]) / sum(alone[n].values())
        for n in ends
    ]
    many = [n for n in between if n >= MANY_ROWS]
    if many and not ends:
        raise ValueError(f"{many} rows were timed, and of {MANY_ROWS} and {SUSTAINED_ROWS} neither, which tell of them")
    for n_rows in many:
        times = max(1.0, statistics.mean(longer))
        between[n_rows] = {one: times * s for one, s in between[n_rows].items()}
    knots, fixed_s = sorted({*fitted, *between, *([FEW_ROWS] if between else [])}), []
    known = at_rows(plain, fitted)
    for n_rows in knots:
        here = at_rows(known, (n_rows,))
        if n_rows in between:
            here = msgspec.structs.replace(here, fixed_s=(0.0,))
            measured = between[n_rows]
            left_s = [s - seconds(here, FORMATS[PLAIN], one, n_rows, calibration) for one, s in measured.items()]
            fixed_s.append(max(0.0, sum(left_s) / len(left_s)))
        else:
            fixed_s.append(here.fixed_s[0])
    return msgspec.structs.replace(at_rows(known, tuple(knots)), fixed_s=tuple(fixed_s))


def at_rows(curve: Curve, rows: tuple[int, ...]) -> Curve:
    """The same with these knots."""
    return msgspec.structs.replace(
        curve, rows=rows, fixed_s=tuple(map(curve.fixed, rows)), flops_share=tuple(map(curve.rate_share, rows))
    )


def product_curves(plain: Curve, calibration: Calibration, report: dict[str, Any] | None = None) -> dict[str, Curve]:
    """Of each format that was timed by rows. plain: bfloat16's. report: None: `FILE`."""
    report = json.loads(FILE.read_text()) if report is None else report
    found = {}
    for form, name in FORMS.items():
        alone = times_of(report, form)
        if alone:
            times = engine_times(alone, FORMATS[name], plain, calibration)
            found[name] = curve_of_times(times, FORMATS[name], plain, calibration)
    return found
