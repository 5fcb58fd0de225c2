"""The curves of kernels timed alone give back what these took, of two shapes."""

from __future__ import annotations

import pytest

from benchmarks.plan_kernels import CHOICE_S, LARGE, even, rows_of
from quire.config.mesh import Mesh
from quire.planner.accelerators import accelerator_named, calibration_for
from quire.planner.formats import FORMATS, Formats
from quire.planner.timing import StepTimer


def experts_us(shape: str, n_rows: int) -> float:
    """Of a layer in MXFP4, the choice left out, by the calibration that comes with Quire."""
    calibration = calibration_for(accelerator_named("h200"))
    timer = StepTimer(even(shape), calibration, Formats(weights=FORMATS["mxfp4"]), Mesh())
    total_s = sum(timer.product_s(one, n_rows) for one in timer.parts.products if one.is_experts)
    return 1e6 * (total_s - CHOICE_S)


def test_experts_of_both_shapes_take_what_they_took_for_a_lone_token() -> None:
    (small,) = (
        one["us"] for one in rows_of("kernels_moe")
        if (one["shape"], one["form"], one["rows"]) == ("qwen3-30b-a3b", "mxfp4", 1)
    )  # fmt: skip
    (large,) = (one["us"] for one in rows_of("kernels_lengths") if one["what"] == LARGE and one["rows"] == 1)
    assert experts_us("qwen3-30b-a3b", 1) == pytest.approx(small, rel=0.01)
    assert experts_us("gpt-oss-20b", 1) == pytest.approx(large, rel=0.01)


def test_experts_of_gpt_oss_that_nobody_fitted() -> None:
    """At two rows by the same term, and at more by Qwen3's curve."""
    for one in rows_of("kernels_lengths"):
        if one["what"] == LARGE and one["rows"] > 1:
            limit = 0.02 if one["rows"] == 2 else 0.12
            assert experts_us("gpt-oss-20b", one["rows"]) == pytest.approx(one["us"], rel=limit), one
