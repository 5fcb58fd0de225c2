"""Curves of formats from kernels timed by rows: what an invented kernel takes is expected of an engine that has it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plan_fit import PRODUCT_ROWS
from benchmarks.plan_products import Times, at_rows, engine_times, filled, product_curves, seconds, times_of
from quire.planner.accelerators import accelerator_named, calibration_for
from quire.planner.formats import FORMATS

MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 8, 16, 17, 32, 64, 128, 256, 512, 1024, 8192)
H200 = calibration_for(accelerator_named("h200"))
PLAIN = H200.products["bfloat16"]


def invented(n_rows: int, n: int, k: int) -> float:
    """Up to 16 rows 4 us and codes at 2.4 TB/s; beyond, 8 us, and tiles of 64 rows at 250 TFLOP/s, where bfloat16's
    kernel reads for most of them."""
    if n_rows <= 16:
        return 4e-6 + FORMATS["int4-g128"].n_bytes(n, k) / 2.4e12
    return 8e-6 + 2.0 * n * k * max(64, -(-n_rows // 64) * 64) / 250e12


def report(matrices: tuple[tuple[int, int], ...] = MATRICES) -> dict[str, Any]:
    rows = []
    for n_rows in ROWS:
        for sizes in matrices:
            time_s = invented(n_rows, *sizes)
            rows.append({"form": "g128", "n": sizes[0], "k": sizes[1], "rows": n_rows, "us": 1e6 * time_s})
    return {"rows": rows}


def layer_s(times: Times, n_rows: int) -> float:
    return sum(times[n_rows].values())


def test_a_layer_takes_what_its_kernels_take() -> None:
    given = report()
    (curve,) = product_curves(PLAIN, H200, given).values()
    weights = FORMATS["int4-g128"]
    wanted = engine_times(times_of(given, "g128"), weights, PLAIN, H200)
    for n_rows in ROWS:
        expected = {sizes: seconds(curve, weights, sizes, n_rows, H200) for sizes in MATRICES}
        assert sum(expected.values()) == pytest.approx(layer_s(wanted, n_rows), rel=0.02), n_rows
        assert sum(expected.values()) == pytest.approx(sum(invented(n_rows, *sizes) for sizes in MATRICES), rel=0.02)
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
        assert found == pytest.approx(invented(n_rows, 4096, 14336), rel=0.1), n_rows


@pytest.mark.parametrize(("form", "faster"), [("int4-g128", 1.0), ("fp8", 1300 / 723)])
def test_products_that_go_on_reach_no_higher_rate_than_the_power_limit_leaves(form: str, faster: float) -> None:
    for n_rows in (256, 1024, 8192):
        plain_s = {sizes: seconds(PLAIN, FORMATS["bfloat16"], sizes, n_rows, H200) for sizes in MATRICES}
        limit_s = sum(plain_s.values()) / faster
        for share in (0.8, 1.3):
            alone = {n_rows: {sizes: share * s / faster for sizes, s in plain_s.items()}}
            found = layer_s(engine_times(alone, FORMATS[form], PLAIN, H200), n_rows)
            assert found == pytest.approx(limit_s * (max(1.0, share) if n_rows >= 512 else share)), (n_rows, share)


def test_fp8_reaches_its_own_rate() -> None:
    rate, rows = 1150e12, []
    for n_rows in (1, 64, 2048):
        for n, k in MATRICES:
            time_s = 5e-6 + max(FORMATS["fp8"].n_bytes(n, k) / 4e12, 2.0 * n * k * n_rows / rate)
            rows.append({"form": "fp8 channels", "n": n, "k": k, "rows": n_rows, "us": 1e6 * time_s})
    (curve,) = product_curves(PLAIN, H200, {"rows": rows}).values()
    layer = sum(seconds(curve, FORMATS["fp8"], sizes, 2048, H200) for sizes in MATRICES)
    assert layer == pytest.approx(sum(2.0 * n * k * 2048 / rate for n, k in MATRICES), rel=0.03)


def test_nothing_is_read_faster_than_bfloat16s_kernel_reads() -> None:
    rows = [
        {"form": "fp8 channels", "n": n, "k": k, "rows": 1, "us": 9 + 1e6 * FORMATS["fp8"].n_bytes(n, k) / 6e12}
        for n, k in MATRICES
    ]  # the chip reads 4.39 TB/s at most
    (curve,) = product_curves(PLAIN, H200, {"rows": rows}).values()
    assert curve.bytes_share == PLAIN.bytes_share


def test_rows_that_no_whole_step_tells_are_as_their_kernel_takes_alone() -> None:
    fitted = at_rows(PLAIN, PRODUCT_ROWS)
    weights, rows = FORMATS["bfloat16"], []
    for n_rows in (64, 144, 192, 1024):
        for n, k in MATRICES:
            us = 1e6 * seconds(fitted, weights, (n, k), n_rows, H200) + 7.0
            rows.append({"form": "bf16", "n": n, "k": k, "rows": n_rows, "us": us})
    curve = filled(fitted, PRODUCT_ROWS, H200, {"rows": rows})
    assert curve.rows == (1, 32, 128, 144, 192, 256, 512, 1024, 8192)
    assert filled(curve, PRODUCT_ROWS, H200, {"rows": rows}) == curve, "made anew of itself"
    assert at_rows(curve, PRODUCT_ROWS) == fitted
    for n_rows, more_us in ((1, 0), (32, 0), (128, 0), (144, 7), (192, 7), (256, 0), (1024, 0), (8192, 0)):
        for sizes in MATRICES:
            before_s, behind_s = (seconds(one, weights, sizes, n_rows, H200) for one in (fitted, curve))
            assert 1e6 * (behind_s - before_s) == pytest.approx(more_us, abs=0.01), (n_rows, sizes)


def test_large_matrices_tell_rates_and_the_others_fixed_costs() -> None:
    """One matrix of the layer takes longer than its bytes say, as a kernel may: no reason to read large ones slowly."""
    large, weights, slow = (57344, 8192), FORMATS["int4-g128"], MATRICES[2]
    given = report()
    for row in given["rows"]:
        row["us"] += 5.0 if (row["n"], row["k"]) == slow else 0.0
    alone = product_curves(PLAIN, H200, given)["int4-g128"]
    given["rows"].append({"form": "g128", "n": large[0], "k": large[1], "rows": 1, "us": 1e6 * invented(1, *large)})
    curve = product_curves(PLAIN, H200, given)["int4-g128"]
    off = [seconds(one, weights, large, 1, H200) / invented(1, *large) - 1 for one in (alone, curve)]
    assert off[0] > 0.1 and abs(off[1]) < 0.04
    layer_us = 1e6 * sum(seconds(curve, weights, sizes, 1, H200) for sizes in MATRICES)
    assert layer_us == pytest.approx(5 + 1e6 * sum(invented(1, *sizes) for sizes in MATRICES), rel=0.01)


def test_what_was_not_timed_has_no_curve() -> None:
    only = {"rows": [row | {"form": "bf16"} for row in report()["rows"]]}
    assert product_curves(PLAIN, H200, only) == {}
