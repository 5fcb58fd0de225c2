"""The kernel benchmark: selection, limits and ratios on known times, failures as rows, one small real run."""

from __future__ import annotations

import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from fixed_timer import LIMITS, SETTING, FixedTimer

from quire.bench import machine
from quire.bench.kernels import (
    attention,
    attention_check,
    chart,
    experts,
    experts_check,
    measurement,
    registry,
    session,
    state,
    state_peer,
    steadiness,
    table,
)
from quire.bench.kernels.case import Case, Check, Contender, NotRun, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.measurement import Accuracy, Progress, Results, Timing
from quire.bench.kernels.paged import Batch, Inputs
from quire.bench.kernels.timing import Call, CpuTimer, Timer
from quire.bench.options import KernelBenchOptions
from quire.cli.main import main
from quire.core.errors import ConfigError
from quire.kernels import catalog
from quire.kernels.attention.schedule.plan import Heads
from quire.kernels.attention.variant import variants
from quire.kernels.moe import hopper, plan
from quire.kernels.state import hopper as state_hopper


def everywhere(op: str, device_type: str, function: str = "") -> list[catalog.Implementation]:
    """As `catalog.runnable`, of a machine that can run all."""
    return [entry for entry in catalog.of(op, device_type) if not function or function in entry.functions]


def contenders(**times_s: float) -> list[Contender]:
    """Those whose names begin with `torch` are peers; NaN raises."""

    def make(seconds: float) -> Sequence[Call]:
        if math.isnan(seconds):
            raise RuntimeError("no such\nkernel")
        return [lambda: seconds]

    return [
        Contender(name, functools.partial(make, seconds), name.startswith("torch")) for name, seconds in times_s.items()
    ]


def timed(*cases: Case) -> Results:
    results = Results(LIMITS)
    measurement.time_all(cases, SETTING, results, 0.0, Progress())
    measurement.judge(cases, results)
    return results


def test_the_limit_is_what_binds() -> None:
    assert LIMITS.least_s(Work(200.0)) == (2.0, "read")
    assert LIMITS.least_s(Work(195.0, 5.0)) == (2.0, "read")
    assert LIMITS.least_s(Work(100.0, 100.0)) == (4.0, "copy")
    assert LIMITS.least_s(Work(200.0, 0.0, 5000.0)) == (5.0, "matmul")
    assert LIMITS.least_s(Work(200.0, 0.0, 5000.0, matmul_speed=2.0)) == (2.5, "matmul")


def test_shares_and_ratios() -> None:
    work = Work(200.0)
    results = timed(
        Case("attention", "plain", work, lambda: contenders(hopper=4.0, triton=5.0, torch=2.0)),
        Case("attention", "capped", work, lambda: contenders(hopper=5.0), baseline="plain"),
        Case("attention", "plan", None, lambda: contenders(host=1.0)),
    )
    rows = {(row.case, row.implementation): row for row in results.timings}
    assert rows["plain", "hopper"].share == 0.5 and rows["plain", "hopper"].bytes_s == 50.0
    assert rows["plain", "hopper"].ratio_to == ""
    assert (rows["plain", "triton"].ratio, rows["plain", "torch"].ratio) == (1.25, 0.5)
    assert (rows["capped", "hopper"].ratio, rows["capped", "hopper"].ratio_to) == (1.25, "plain")
    assert rows["plan", "host"].bound == "host" and math.isnan(rows["plan", "host"].share)
    assert not results.failed
    text = "\n".join(table.lines(results))
    assert "1.25 x plain" in text and "· torch" in text


def test_a_failure_is_a_row_and_the_run_goes_on() -> None:
    def broken() -> Iterator[Contender]:
        raise MemoryError("too large")

    good = Case("norm", "good", Work(1.0), lambda: contenders(triton=1.0, torch=math.nan))
    results = timed(good)
    assert not results.failed, "a peer that fails is not our failure"
    results = timed(Case("norm", "broken", Work(1.0), broken), good)
    assert results.failed and len(results.timings) == 3
    assert "MemoryError: too large" in "\n".join(table.lines(results))
    assert "RuntimeError: no such kernel" in "\n".join(table.lines(results))


def test_a_case_that_nothing_computes_says_so() -> None:
    assert "nothing computes norm" in "\n".join(table.lines(timed(Case("norm", "alone", Work(1.0), list))))


def test_each_op_is_measured_here_beside_its_peer() -> None:
    """Each has an implementation of ours, also on a CPU."""
    setting = Setting(FixedTimer(), torch.float32, quick=True)
    for op in ("gemm", "norm", "act", "kvstore"):
        case = next(case for case in registry.OPS[op][0](op, setting) if case.quick)
        names = {one.name: one.is_peer for one in case.contenders()}
        assert names.pop("torch") and names and not any(names.values()), op


def test_what_cannot_run_is_a_note_and_wrong_results_fail() -> None:
    def refused() -> float:
        raise NotRun("head_dim 7")

    def check(error: object) -> Check:
        return Check("norm", "rms_norm", "cpu", error, 0.5)  # type: ignore[arg-type]

    rows = measurement.check_all([check(lambda: 0.4), check(refused)], Progress())
    assert [(row.good, row.bad, row.note) for row in rows] == [(True, False, ""), (False, False, "head_dim 7")]
    assert not Results(LIMITS, accuracies=rows).failed
    assert "not checked: head_dim 7" in table.accuracy_line(rows[1])
    for bad in (lambda: 0.6, lambda: math.nan, lambda: 1 // 0):
        results = Results(LIMITS, accuracies=measurement.check_all([check(bad)], Progress()))
        assert results.failed


@pytest.mark.parametrize(
    ("error", "of_kind", "word"),
    [(0.4, "rows", "right"), (0.6, "rows", "wrong"), (0.4, "other rows", "not checked"), (None, "rows", "not checked")],
)
def test_a_time_says_whether_its_kind_was_compared(error: float | None, of_kind: str, word: str) -> None:
    def found() -> float:
        if error is None:
            raise NotRun("no such rows")
        return error

    case = Case("norm", "8 rows", Work(1.0), lambda: contenders(triton=1.0, torch=1.0), "rows")
    results = Results(LIMITS, measurement.check_all([Check("norm", of_kind, "triton", found, 0.5)], Progress()))
    measurement.time_all([case], SETTING, results, 0.0, Progress())
    measurement.judge([case], results)
    assert [row.checked for row in results.timings] == [word, ""]
    text = "\n".join(table.lines(results))
    assert (word.upper() in text) == (word != "right") and ("1 times are of impl" in text) == (word == "not checked")
    assert results.failed == (word == "wrong")


def test_many_checks_of_one_are_a_line_and_what_is_wrong() -> None:
    rows = [Accuracy("gemm", f"{n} rows", "hopper", error=n / 100, tolerance=0.5) for n in range(30)]
    rows += [Accuracy("gemm", "900 rows", "hopper", error=0.7, tolerance=0.5)]
    rows += [Accuracy("gemm", f"{n} rows", "hopper", note="torch is faster") for n in (40, 41)]
    few = [Accuracy("gemm", "1 row", "composed", error=0.1, tolerance=0.5)]
    found = [" ".join(line.split()) for line in table.accuracy_lines([*rows, *few])]
    assert found == [
        "gemm 900 rows hopper 7.0e-01 of 5.0e-01 allowed WRONG",
        "gemm hopper 30 of 33 are right, the worst: 2.9e-01 of 5.0e-01 allowed, 29 rows",
        "gemm hopper 2 of 33 not checked, the first: 40 rows: torch is faster",
        "gemm 1 row composed 1.0e-01 of 5.0e-01 allowed",
    ]


class NoGpuTimer(FixedTimer):
    device = torch.device("cuda")


@pytest.mark.parametrize("timer", [CpuTimer(), NoGpuTimer()], ids=["cpu", "cuda"])
def test_what_is_timed_has_a_check(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each implementation that there is for the device, whether or not this machine can run it."""
    monkeypatch.setattr(catalog, "runnable", everywhere)
    setting = Setting(timer, torch.bfloat16)
    for op, (make_cases, make_checks) in registry.OPS.items():
        kinds = {case.kind for case in make_cases(op, setting) if case.work is not None}
        of_torch = {"olmoe-1b-7b, 1 rows"} if timer.device.type == "cpu" else set()
        assert "" not in kinds and kinds - of_torch <= {check.name for check in make_checks(op, setting)}, op


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_checks_of_experts_run_the_kernels_that_are_timed(dtype: torch.dtype) -> None:
    """With fewer experts the Hopper kernels take them, and are compiled alike."""
    for entry in experts.entries(Setting(NoGpuTimer(), dtype)):
        if entry.function not in ("experts", "experts_with_shared"):
            continue
        n_shared = 2 * (entry.function == "experts_with_shared")
        group = {"": 0, "mxfp4": 32, "int4 g128": 128, "fp8": 0, "fp8 blocks": 128}[entry.form]
        codes = plan.CodesShape(
            ("", "fp8", "", "int4", "mxfp4").index(entry.form.split()[0]) if entry.form else 0, group
        )
        built: list[tuple[object, ...]] = []
        for one, n in ((entry.shape, entry.n), experts_check.smaller(entry.shape, entry.n, "cuda")):
            shape = plan.ExpertsShape(
                n, one.n_chosen + n_shared, one.n_experts + n_shared, one.hidden, one.inner, codes
            )  # fmt: skip
            assert hopper.static_obstacle(shape, dtype) is None
            built.append(hopper.variants(plan.plan(shape), dtype, codes))
        assert built[0] == built[1], entry.name
    clamped = experts_check.CLAMPED_SHAPE
    shape = plan.ExpertsShape(
        experts_check.CLAMPED_ROWS, clamped.n_chosen, clamped.n_experts, clamped.hidden, clamped.inner
    )
    assert hopper.static_obstacle(shape, dtype) is None


def test_only_what_an_implementation_has_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have two of the three scans. The peer has one."""
    monkeypatch.setattr(catalog, "runnable", everywhere)
    for check in state.checks("state", Setting(NoGpuTimer(), torch.bfloat16)):
        if check.implementation == state_peer.NAME:
            assert check.name.split()[0] == "scan_delta"
            continue
        assert check.name.split()[0] in catalog.entry("state", check.implementation).functions


@pytest.mark.parametrize("scan", state.SCANS, ids=lambda scan: scan.function)
def test_checks_of_state_have_the_sizes_that_are_timed(scan: state.Scan) -> None:
    for device in ("cpu", "cuda"):
        small, timed_sizes = scan.smaller(device), scan.on(device)
        assert (small.head_dim, small.size) == (timed_sizes.head_dim, timed_sizes.size)
        assert small.heads < timed_sizes.heads and small.heads // small.shared > 1
        n_rows = state.CHECKED["rows"].n_rows
        assert device == "cpu" or n_rows * small.heads >= state_hopper.LEAST_HEADS, "that for many updates is checked"


def test_no_case_begins_after_the_time_limit() -> None:
    """What was built and checked before the first case does not count; a case does."""
    progress, results = Progress(), Results(LIMITS)
    progress.start_s -= 1000

    def slow() -> list[Contender]:
        progress.start_s -= 100
        return contenders(cpu=1.0)

    cases = [Case("norm", "first", None, slow), Case("norm", "late", None, lambda: contenders(cpu=1.0))]
    measurement.time_all(cases, SETTING, results, 99.0, progress)
    assert results.left_out == ["norm: late"] and {one.case for one in results.timings} == {"first"}
    assert "1 cases were not measured" in "\n".join(table.lines(results))


def test_work_of_a_batch() -> None:
    heads = Heads(4, 2, 8)
    work = Batch(((10, 1), (3, 3)), heads=heads).work(variants.causal(1.0), 2)
    assert work.flops == 4 * (10 + 1 + 2 + 3) * 4 * 8
    assert work.written_bytes == 4 * 4 * 8 * 2 and work.read_bytes == 2 * 13 * 2 * 8 * 2 + work.written_bytes
    windowed = Batch(((10, 1),), heads=heads).work(variants.causal(1.0, window=3, n_first=2), 2)
    assert windowed.flops == 4 * 5 * 4 * 8 and windowed.read_bytes == (2 * 5 * 2 + 4) * 8 * 2
    shared = Batch(((10, 1), (11, 1)), heads=heads, page_size=4, n_shared=8).work(variants.causal(1.0), 2)
    assert shared.read_bytes == (2 * (8 + 2 + 3) * 2 + 8) * 8 * 2


def test_pages_are_distinct_and_shared_ones_are_the_same() -> None:
    batch = Batch(((40, 1), (33, 1), (64, 5)), page_size=8, n_shared=32)
    pages, n_pages = batch.page_table()
    own = np.concatenate([row[4 : -(-kv_len // 8)] for row, (kv_len, _) in zip(pages, batch.spans, strict=True)])
    used = np.concatenate((pages[0, :4], own))
    assert (pages[:, :4] == pages[0, :4]).all()
    assert sorted(used) == list(range(1, n_pages)) and list(own) != sorted(own)


def test_inputs_leave_the_cache_and_poison_what_no_token_owns() -> None:
    timer = CpuTimer()
    assert timer.n_copies(timer.cache_bytes) == 3 and timer.n_copies(100 * timer.cache_bytes) == 1
    batch = Batch(((9, 1), (8, 2)), heads=Heads(2, 1, 4), page_size=4)
    inputs = Inputs(batch, Setting(timer, torch.float32), n_copies=1, poison=True)
    k, _ = inputs.pools[0]
    assert k.isnan().sum() == (4 + 3) * 4, "the dummy page and three cells behind the ninth token"
    assert not (k == 0).any()


def test_every_check_passes_here() -> None:
    """All ops but attention, whose variants have tests of their own, and those of which a CPU has the reference alone;
    in float32, where an error would show."""
    torch.manual_seed(0)  # the farthest of all numbers depends on what they are
    setting = Setting(CpuTimer(), torch.float32)
    ops = [name for name in registry.OPS if name not in ("attention", "w8a8", "w4a16", "mxfp4")]
    checks = [check for name in ops for check in registry.OPS[name][1](name, setting)]
    rows = measurement.check_all(checks, Progress())
    assert [row for row in rows if not row.good] == []
    assert {row.op for row in rows} == set(ops)


@pytest.mark.skipif(catalog.native_obstacle() is not None, reason="only the reference runs attention")
def test_drafts_in_a_tree_are_checked() -> None:
    checks = attention_check.checks("attention", Setting(CpuTimer(), torch.float32))
    check = next(check for check in checks if check.name == "tree_mask")
    assert check.error() <= check.tolerance


def test_the_lists_of_cases() -> None:
    for cases in (attention.cuda_cases(), attention.cpu_cases()):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        assert {case.baseline for case in cases} - {""} <= set(names)
    assert len(attention.cuda_cases()) > 45
    lengths = [case.batch.kv_lens for case in attention.cuda_cases() if "lognormal" in case.name]
    assert [(round(one.mean(), -2), one.max()) for one in lengths] == [(2000, 8848), (1700, 10332)]


def test_options_select_cases() -> None:
    setting = Setting(CpuTimer(), torch.float32, quick=True)
    cases, checks = session.chosen(KernelBenchOptions(ops="norm,sample"), setting)
    assert {case.op for case in cases} == {check.op for check in checks} == {"norm", "sample"}
    cases, checks = session.chosen(KernelBenchOptions(cases="decode 8 x 2k sinks"), setting)
    assert [case.name for case in cases] == ["decode 8 x 2k", "decode 8 x 2k sinks"], "with its baseline"
    assert {check.name for check in checks} == {"causal", "learned_sinks"}, "of what is timed, also in a quick run"
    with pytest.raises(ConfigError, match="did you mean norm"):
        session.chosen(KernelBenchOptions(ops="nrom"), setting)
    with pytest.raises(ConfigError, match="selects no case"):
        session.chosen(KernelBenchOptions(cases="nothing"), setting)


@pytest.mark.parametrize(
    ("together_ms", "alone_ms", "n_threads", "found"),
    [
        ((0.3, 0.3, 0.6), (0.5, 0.5), 2, ""),
        ((8.0, 8.0, 8.0), (0.5, 9.0), 2, "OMP_NUM_THREADS=1"),
        ((0.3, 0.3, 0.3, 8.0), (0.5, 9.0), 2, "OMP_NUM_THREADS=1"),
        ((0.5, 4.0, 4.0), (0.5, 4.0), 1, "a quiet machine"),
        ((0.5, 0.6, 0.6), (0.5, 0.6), 1, ""),
    ],
)
def test_times_of_busy_cores_are_noticed(
    together_ms: Sequence[float], alone_ms: Sequence[float], n_threads: int, found: str
) -> None:
    warning = steadiness.verdict([t / 1e3 for t in together_ms], [t / 1e3 for t in alone_ms], n_threads)
    assert warning.startswith("WARNING") == bool(found) and found in warning
    assert ("OMP_NUM_THREADS" in warning) == (bool(found) and n_threads > 1)


def test_a_case_whose_times_jump_is_noticed() -> None:
    steady, jumping = (Timing("norm", name, "cpu", False, 8e-3, best_s) for name, best_s in (("a", 6e-3), ("b", 1e-3)))
    failed = Timing("norm", "c", "cpu", False, error="no")
    assert not steadiness.of_times([steady, failed], 2)
    assert "norm b, cpu is 8 times its best" in steadiness.of_times([steady, jumping, failed], 2)


def test_a_plot_says_where_it_comes_from_and_tells_contenders_apart() -> None:
    ours = ("hopper", "triton", "composed")
    peers = [f"torch {name}{dense}" for name in ("cudnn", "flash", "efficient") for dense in ("", " (dense)")]
    names = (*ours, *peers, "torch", "flashinfer")
    rows = [Timing("attention", "", name, name not in ours, share=0.5) for name in names]
    colours = [tuple(bytes.fromhex(colour[1:])) for colour in chart._colours(rows).values()]
    nearest = min(math.dist(a, b) for a, b in itertools.combinations(colours, 2))
    assert nearest > 50, "of 255 in each of red, green and blue"
    assert machine.cpu_model() in chart.origin() and machine.commit()[:10] in chart.origin()


def test_a_run_writes_a_table_a_report_and_a_plot(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steadiness, "of_probe", lambda: "WARNING: busy")
    monkeypatch.setattr(session, "measure_limits", lambda timer, dtype: LIMITS)
    report, plot = tmp_path / "k.json", tmp_path / "k.png"
    arguments = ["--device", "cpu", "--quick", "--dtype", "fp32", "--cases", "decode 1 x 4k,greedy"]
    assert main(["bench", "kernels", *arguments, "--output", str(report), "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    assert "decode 1 x 4k" in out and "greedy" in out
    assert out.count("WARNING: busy") == err.count("WARNING: busy") == 1
    found = json.loads(report.read_text())
    assert found["benchmark"] == "kernels" and found["hardware"]["cpu"] and found["config"]["quick"] is True
    assert [one for one in found["results"]["notes"] if "100 %" not in one] == ["WARNING: busy"]
    assert {row["check"] for row in found["results"]["errors"]} == {"causal", "greedy"}
    times = {(row["case"], row["implementation"]): row for row in found["results"]["times"]}
    best = catalog.runnable("attention", "cpu", "run")[0].name
    assert times["decode 1 x 4k", best]["time_s"] > 0 and times["decode 1 x 4k", "torch flash (dense)"]["is_peer"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_gpu_that_is_not_there_and_a_wrong_path_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if catalog.cuda_obstacle():
        assert main(["bench", "kernels", "--device", "cuda"]) == 2
        assert "no CUDA device" in capsys.readouterr().err
    assert main(["bench", "kernels", "--plot", "x.svg"]) == 2
    assert ".png" in capsys.readouterr().err


def test_contenders_take_turns() -> None:
    order: list[str] = []
    clock = itertools.count(1)

    def make(name: str) -> Sequence[Call]:
        return [lambda: order.append(name) or next(clock)]

    case = Case("norm", "turns", None, lambda: [Contender(name, functools.partial(make, name)) for name in "ab"])
    assert [row.time_s for row in timed(case).timings] == [2.0, 3.0] and order == ["a", "b", "a", "b"]
