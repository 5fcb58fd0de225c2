"""Curves of formats from kernels timed by rows: what an invented kernel takes is expected of an engine that has it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plan_products import Times, engine_times, product_curves, seconds, times_of
from quire.planner.accelerators import accelerator_named, calibration_for
from quire.planner.formats import FORMATS

MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 8, 16, 17, 32, 64, 128, 256, 512, 1024, 8192)
H200 = calibration_for(accelerator_named("h200"))
PLAIN = H200.products["bfloat16"]
SLOWER = 1.06
"""Products of many rows that go on."""


def invented(n_rows: int, n: int, k: int) -> float:
    """Up to 16 rows 4 us and codes at 2.4 TB/s; beyond, 8 us, and tiles of 64 rows at 250 TFLOP/s, where bfloat16's
    kernel reads for most of them."""
    if n_rows <= 16:
        return 4e-6 + FORMATS["int4-g128"].n_bytes(n, k) / 2.4e12
    return 8e-6 + 2.0 * n * k * max(64, -(-n_rows // 64) * 64) / 250e12


def in_engine(n_rows: int, n: int, k: int) -> float:
    return invented(n_rows, n, k) * (SLOWER if n_rows >= 512 else 1.0)


def report(matrices: tuple[tuple[int, int], ...] = MATRICES) -> dict[str, Any]:
    rows = []
    for n_rows in ROWS:
        for sizes in matrices:
            plain_s = seconds(PLAIN, FORMATS["bfloat16"], sizes, n_rows, H200) / (SLOWER if n_rows >= 512 else 1.1)
            for form, time_s in (("bf16", plain_s), ("g128", invented(n_rows, *sizes))):
                rows.append({"form": form, "n": sizes[0], "k": sizes[1], "rows": n_rows, "us": 1e6 * time_s})
    return {"rows": rows}


def layer_s(times: Times, n_rows: int) -> float:
    return sum(times[n_rows].values())


def test_a_layer_takes_what_its_kernels_take() -> None:
    given = report()
    (curve,) = product_curves(PLAIN, H200, given).values()
    wanted = engine_times(times_of(given, "g128"), times_of(given, "bf16"), PLAIN, H200)
    weights = FORMATS["int4-g128"]
    for n_rows in ROWS:
        expected = {sizes: seconds(curve, weights, sizes, n_rows, H200) for sizes in MATRICES}
        assert sum(expected.values()) == pytest.approx(layer_s(wanted, n_rows), rel=0.02), n_rows
        assert sum(expected.values()) == pytest.approx(sum(in_engine(n_rows, *sizes) for sizes in MATRICES), rel=0.02)
        for sizes in MATRICES:
            assert expected[sizes] == pytest.approx(wanted[n_rows][sizes], rel=0.1), (n_rows, sizes)


def test_between_few_rows_and_many_there_is_a_step() -> None:
    (curve,) = product_curves(PLAIN, H200, report()).values()
    sizes, weights = (28672, 4096), FORMATS["int4-g128"]
    before, behind = (seconds(curve, weights, sizes, n_rows, H200) for n_rows in (16, 17))
    assert behind > 1.5 * before
    assert seconds(curve, weights, sizes, 12, H200) == pytest.approx(before, rel=0.05)
    assert seconds(curve, weights, sizes, 48, H200) == pytest.approx(behind, rel=0.15), "one tile, whatever its rows"


def test_a_matrix_that_nobody_timed_is_predicted() -> None:
    (curve,) = product_curves(PLAIN, H200, report(MATRICES[:3])).values()
    for n_rows in ROWS:
        found = seconds(curve, FORMATS["int4-g128"], (4096, 14336), n_rows, H200)
        assert found == pytest.approx(in_engine(n_rows, 4096, 14336), rel=0.1), n_rows


def test_what_was_not_timed_has_no_curve() -> None:
    only = {"rows": [row for row in report()["rows"] if row["form"] == "bf16"]}
    assert product_curves(PLAIN, H200, only) == {}
