"""The kernel benchmark on a CPU: how time is divided, what is said of the table, and the experts that take part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fixed_timer import LIMITS, SETTING, FixedTimer

from quire.bench.kernels import experts, experts_check, measurement, table
from quire.bench.kernels.case import Case, Contender, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.measurement import Accuracy, Progress, Results, Timing
from quire.kernels.moe import reference


def lasting(seconds: float) -> list[Contender]:
    return [Contender("cpu", lambda: [lambda: seconds])]


def judged(case: Case) -> list[Timing]:
    results = Results(LIMITS)
    measurement.time_all([case], SETTING, results, 0.0, Progress())
    measurement.judge([case], results)
    return results.timings


def test_each_op_has_a_share_of_the_time() -> None:
    """What one leaves goes to the next ones; one that took too long leaves the others a case each."""
    progress, results = Progress(), Results(LIMITS)

    def taking(seconds: float) -> Callable[[], list[Contender]]:
        def make() -> list[Contender]:
            progress.start_s -= seconds
            return lasting(1.0)

        return make

    taken = {"moe": (10.0, 90.0, 1.0), "norm": (200.0, 100.0, 1.0), "state": (1.0, 1.0), "mla": (50.0, 1000.0, 1.0)}
    cases = [Case(op, str(i), None, taking(one)) for op, each in taken.items() for i, one in enumerate(each)]
    measurement.time_all(cases, SETTING, results, 400.0, progress)
    assert results.left_out == ["moe: 2", "norm: 1", "norm: 2", "mla: 2"]
    progress, results = Progress(), Results(LIMITS)
    cases = [Case("moe", str(i), None, taking(100.0)) for i in range(3)] + [Case("mla", "0", None, taking(1.0))]
    measurement.time_all(cases, SETTING, results, 400.0, progress)
    assert results.left_out == [], "the last op left time for the first one"
    assert [one.op for one in results.timings] == ["moe", "moe", "moe", "mla"], "in order, whenever it was timed"
    progress, results = Progress(), Results(LIMITS)
    cases = [Case(op, str(i), None, taking(500.0)) for op in ("moe", "mla", "state") for i in range(2)]
    measurement.time_all(cases, SETTING, results, 400.0, progress)
    assert [(one.op, one.case) for one in results.timings] == [("moe", "0"), ("mla", "0"), ("state", "0")]


def test_a_rate_beyond_that_of_memory_is_explained() -> None:
    """A small case's matrices stay in a CPU's caches; a share of products has no such reason."""
    case = Case("norm", "small", Work(200.0), lambda: lasting(1.0))
    assert measurement.beyond_memory(judged(case)).startswith("1 time is of more than 100 % of the limit")
    of_products = Case("gemm", "large", Work(1.0, 0.0, 5000.0), lambda: lasting(1.0))
    assert measurement.beyond_memory(judged(of_products)) == ""


def test_columns_are_apart_whatever_stands_in_them() -> None:
    check = "olmoe-1b-7b, router and choice of 256 rows"
    line = table.accuracy_line(Accuracy("moe", check, "composed", error=1e-6, tolerance=1e-3))
    assert f"{check}      composed  " in line
    assert f"{'x' * 60}  cpu  " in table.timing_line(Timing("moe", "x" * 60, "cpu", False, time_s=1.0))


def test_the_experts_of_a_cpu_are_timed_as_they_are_packed() -> None:
    """Not rounded, beside torch's product of the same matrices."""
    setting = Setting(FixedTimer(), torch.bfloat16)
    shape = experts.Shape(4, 2, 64, 32)
    entry = next(one for one in experts.entries(setting) if one.name in experts.QUICK)
    assert entry.function == "packed_experts" and entry.form == ""
    given = entry.make(shape, 3, setting)
    plain = reference.experts(*experts.unpacked(*given)).float()
    assert (reference.packed_experts(*given).float() - plain).abs().max() < 0.05 * plain.abs().max()
    case = next(one for one in experts.cases("moe", setting) if one.name == entry.name)
    assert case.kind in {check.name for check in experts_check.checks("moe", setting)}
