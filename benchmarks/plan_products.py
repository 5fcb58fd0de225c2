"""A format's curve of products, of kernels timed by rows (`product_rows`): kernels_products.json is all that is read.

An engine takes as long as its kernels alone where these read memory: bfloat16's, whose curve is fitted to whole steps,
does within a few percent. From `MANY_ROWS` on it takes longer, as the chip is at its power limit when products go on;
other formats do so as much. Of each number of rows a line through the matrices of a layer tells fixed costs from those
of size.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Final

import msgspec
import numpy

from quire.planner.calibration import SHARPNESS, Calibration, Curve
from quire.planner.formats import FORMATS, WeightFormat

FILE: Final = pathlib.Path(__file__).with_name("results") / "h200" / "kernels_products.json"
FORMS: Final = {"g128": "int4-g128", "fp8 channels": "fp8"}
"""A form of the file → the format of the planner."""
PLAIN: Final = "bf16"
MANY_ROWS: Final = 512
"""Arithmetic binds any format's products of so many."""
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
    than that, arithmetic binds, at the rate that is left for it. plain: whose tiles there are, and whose rate is the
    most."""
    n_few, *_ = times
    _, byte_s = line([(weights.n_bytes(*sizes), s) for sizes, s in times[n_few].items()])
    most = max(plain.flops_share) * calibration.rate("bfloat16") / calibration.rate(weights.products)
    found = Curve(bytes_share=1 / (byte_s * calibration.read_bytes_per_s), tile=plain.tile)
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
        lacking = [s - seconds(here, weights, sizes, n_rows, calibration) for sizes, s in measured.items()]
        shares.append(float(share))
        fixed_s.append(max(0.0, sum(lacking) / len(lacking)))
    return msgspec.structs.replace(found, rows=tuple(times), fixed_s=tuple(fixed_s), flops_share=tuple(shares))


def engine_times(alone: Times, plain_alone: Times, plain: Curve, calibration: Calibration) -> Times:
    """Of kernels that go on. plain_alone: bfloat16's kernel; plain: its curve in an engine."""
    weights, found = FORMATS["bfloat16"], {}
    for n_rows, measured in alone.items():
        times = 1.0
        if n_rows >= MANY_ROWS:
            known = plain_alone[n_rows]
            going_on_s = sum(seconds(plain, weights, sizes, n_rows, calibration) for sizes in known)
            times = max(1.0, going_on_s / sum(known.values()))
        found[n_rows] = {sizes: times * s for sizes, s in measured.items()}
    return found


def product_curves(plain: Curve, calibration: Calibration, report: dict[str, Any] | None = None) -> dict[str, Curve]:
    """Of each format that was timed by rows. plain: bfloat16's. report: None: `FILE`."""
    report = json.loads(FILE.read_text()) if report is None else report
    plain_alone, found = times_of(report, PLAIN), {}
    for form, name in FORMS.items():
        alone = times_of(report, form)
        if alone:
            times = engine_times(alone, plain_alone, plain, calibration)
            found[name] = curve_of_times(times, FORMATS[name], plain, calibration)
    return found
