"""`quire bench calibrate` on a CPU: a file that the planner reads. No figure is judged: machines that test are busy.

Of its cases for a GPU: that they have the steps that are to be timed, and that its knobs find a GPU's numbers.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from typing import Any

import msgspec
import pytest

from quire.bench import calibrate
from quire.bench.datasets import from_lengths
from quire.bench.offline import TimedRun, decode_steps, timed_run
from quire.bench.shape import shape_options
from quire.cli.command import run
from quire.config.model import read_arch
from quire.engine.llm import LLM
from quire.planner import fitting
from quire.planner.accelerators import USUAL_CPU, accelerator_named, calibration_for
from quire.planner.calibration import load_calibration
from quire.planner.formats import formats_named
from quire.planner.operators import decode_spans, prefill_spans

CASES = calibrate.Cases(
    models=(calibrate.Model("qwen3-0.6b", 1, "none", 512), calibrate.Model("qwen3-0.6b", 1, "int8", 512)),
    batches=(1, 2), contexts=(16,), prompts=(32,), rows=(1, 4, 16, 64, 256),
)  # fmt: skip


def test_it_writes_what_plan_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(calibrate.CASES, "cpu", CASES)
    path = tmp_path / "cpu.json"
    assert run(["bench", "calibrate", "--device", "cpu", "--rounds", "1", "--output", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.count("measured") == 2 * (2 + 1), "a line for each step"
    found = load_calibration(path)
    assert found.device == "cpu" and set(found.products) == {"bfloat16", "int8"} and found.captured == 0
    assert "quire bench calibrate: 6 steps" in found.source and found.error >= 0.02
    assert {(one.kinds, one.n_figures, one.error) for one in found.records} == {
        ((), 3, found.error), (("weights in int8",), 3, found.error)
    }, "of both error bars are those of these steps"  # fmt: skip
    assert run(["plan", "demo", "--gpu", "here", "--calibration", str(path), "--slo", "none"]) == 0  # however busy
    assert "1 x CPU" in capsys.readouterr().out


def test_what_others_used_of_the_cores_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calibrate.CASES, "cpu", CASES)
    monkeypatch.setattr(calibrate.Others, "share", lambda self: 0.5)
    found, _ = calibrate.calibrate("cpu", 1, lambda line: None)
    assert found.error >= 1.0 and found.source.endswith("; other programs used 50 % of the cores meanwhile")


def test_narrow_models_tell_little_and_have_an_error_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = calibrate.Model("llama-3.2-1b", 1, "none", 512, narrow=True)
    monkeypatch.setitem(calibrate.CASES, "cpu", dataclasses.replace(CASES, models=(CASES.models[0], narrow)))
    found, samples = calibrate.calibrate("cpu", 1, lambda line: None)
    few = [one for one in samples if one.weight < 1]
    assert [one.name.startswith("narrow") for one in samples] == [False] * 3 + [True] * 2 and len(few) == 2
    of = {one.kinds: one for one in found.records}
    assert of[()].error == found.error <= of["a width below 1,024",].error and of["a width below 1,024",].n_figures == 2


def test_nine_of_ten() -> None:
    assert calibrate.nine_of_ten([0.001]) == 0.02 and calibrate.nine_of_ten([0.1, 0.3]) == 0.3
    assert calibrate.nine_of_ten([0.1] * 18 + [5.0]) == pytest.approx(0.1)


def test_the_share_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([(9.0, 100.0), (13.0, 104.0), (0.0, 0.0), (9.0, 2.0)])
    monkeypatch.setattr(calibrate.Others, "_figures", staticmethod(lambda: next(figures)))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert calibrate.Others().share() == pytest.approx(0.5), "4 s of two cores in 4 s"
    assert calibrate.Others().share() == 0.9, "all of them is no share"


def test_steps_that_contradict_each_other_and_a_limit_that_was_passed_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is written, and a plan made with it shows that it is worth little."""
    path = tmp_path / "cpu.json"
    for error, limit_s in ((0.63, 1e-9), (0.2, 0), (0.2, 1000)):
        found = msgspec.structs.replace(USUAL_CPU, source="quire bench calibrate", error=error)
        monkeypatch.setattr(calibrate, "calibrate", lambda *_, made=found: (made, []))
        words = ["bench", "calibrate", "--device", "cpu", "--output", str(path), "--time-limit", str(limit_s)]
        assert run(words) == 0
        text = capsys.readouterr().out
        assert ("The file has that error in it, ± 63 %, and no plan" in text) == (error == 0.63)
        assert ("s, more than --time-limit 1e-09" in text.splitlines()[-1]) == (limit_s == 1e-9) == ("it took" in text)
        assert run(["plan", "shape:qwen3-0.6b", "--gpu", "here", "--calibration", str(path), "--slo", "none"]) == 0
        assert f"± {100 * error:.0f} %" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "calibrate", "--device", "cpu", "--output", "/nowhere/c.json"]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_machine_that_was_not_calibrated_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """`--gpu here`: reads and products are measured, the rest is assumed."""
    assert run(["plan", "demo", "--gpu", "here", "--workload", "offline"]) == 0
    text = capsys.readouterr().out
    assert "assumed: " in text and "`quire bench calibrate` does" in text and "quire serve demo" in text


def test_every_batch_of_a_gpu_decodes_as_a_whole_for_some_steps() -> None:
    """The first sequences go on while the prompts of the last ones are computed."""
    cases = calibrate.CASES["cuda"]
    assert max(*cases.prompts, max(cases.contexts) + cases.output_len) < cases.max_len
    llm = LLM(
        **shape_options("qwen3-0.6b"), device="null", max_num_seqs=max(cases.batches), max_model_len=cases.max_len,
        enable_prefix_caching=False,
    )  # fmt: skip
    for batch, context in ((max(cases.batches), min(cases.contexts)), (256, max(cases.contexts))):
        assert batch * context <= calibrate.MAX_TOKENS
        run_ = timed_run(llm, from_lengths([(context, cases.output_len)] * batch, 1000, "whole")(0), 0.0)
        assert len(decode_steps(run_.timeline, batch)) >= 16
    llm.shutdown()


def test_a_batch_that_never_decodes_as_a_whole_is_left_out() -> None:
    model = calibrate.Model("qwen3-0.6b", 1, "none", 512)
    cases = calibrate.Cases((model,), batches=(2, 64), contexts=(1024,), prompts=(64,), rows=(1, 4), output_len=4)
    names = [one.name for one in calibrate._samples(model, "null", cases, 1)]
    assert [name.partition(": ")[2] for name in names] == ["2 x 1024", "1 x 64 prompt"]


def test_behind_the_time_limit_no_turn_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    model = calibrate.Model("qwen3-0.6b", 1, "none", 512)
    cases = calibrate.Cases((model,), batches=(2,), contexts=(32,), prompts=(64,), rows=(1, 4), output_len=4)
    runs = []

    def counted(*arguments: Any, **options: Any) -> TimedRun:
        runs.append(timed_run(*arguments, **options))
        return runs[-1]

    monkeypatch.setattr(calibrate, "timed_run", counted)
    for end_s, n_turns in ((0.0, 1), (math.inf, 3)):
        runs.clear()
        assert len(calibrate._samples(model, "null", cases, 3, end_s)) == 2
        assert len(runs) == 2 * (1 + n_turns), "one turn warms up"


def test_the_knobs_of_a_gpu_find_what_its_steps_were_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as the H200's own calibration has them: few rows, many, and prompts of one tile and of many."""
    truth, cases = calibration_for(accelerator_named("h200")), calibrate.CASES["cuda"]
    model, formats = cases.models[-1], formats_named("auto")
    arch = read_arch(pathlib.Path(str(shape_options(model.shape)["model"])), model.overrides)
    given = [(decode_spans(n, n_in), False) for n, n_in in ((1, 128), (32, 1024), (256, 128), (256, 1024))]
    given += [(prefill_spans(n), True) for n in cases.prompts]
    samples = [
        fitting.Sample(name="", arch=arch, formats=formats, spans=spans, seconds=1.0, waits=waits)
        for spans, waits in given
    ]
    samples = [msgspec.structs.replace(one, seconds=one.expected_s(truth)) for one in samples]
    flops = {"bfloat16": truth.flops_per_s["bfloat16"]}
    monkeypatch.setattr(fitting, "LAST_FACTOR", 1.05)  # a rough search is enough
    start = calibrate._start("NVIDIA H200", truth.read_bytes_per_s, flops, cases, "cuda")
    found = fitting.fit(start, samples, calibrate._knobs(flops, cases))
    errors = {one.spans.lengths[0] * len(one.spans): one.expected_s(found) / one.seconds - 1 for one in samples}
    assert max(map(abs, errors.values())) < 0.1, errors


def test_what_no_step_tells_of_a_gpu_is_not_lost() -> None:
    """Else weights in FP8 would be multiplied as slowly as bfloat16, and the sums of ranks forgotten."""
    cases, flops = calibrate.CASES["cuda"], {"bfloat16": 700e12}
    known = calibration_for(accelerator_named("h200"))
    here = calibrate._start("NVIDIA H200", 4e12, flops, cases, "cuda")
    assert here.products["fp8"] == known.products["fp8"] and here.experts == known.experts and here.sums == known.sums
    assert here.products["bfloat16"].rows == cases.rows and here.read_bytes_per_s == 4e12
    assert here.rate("fp8") / 700e12 == pytest.approx(known.rate("fp8") / known.rate("bfloat16"))
    other = calibrate._start("NVIDIA H100 80GB HBM3", 3e12, flops, cases, "cuda")
    assert (
        set(other.products) == {"bfloat16"}
        and other.sums is None
        and other.rate("fp8") == pytest.approx(1400e12, rel=1e-3)
    )
    unknown = calibrate._start("NVIDIA Something", 3e12, flops, cases, "cuda")
    assert unknown.flops_per_s == flops and unknown.device == "nvidia something"


def test_the_fit_of_a_gpu_is_a_small_part_of_its_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 28 steps: if any gain counted, it would look 36,000 times, 24 s."""
    truth, cases, samples = calibration_for(accelerator_named("h200")), calibrate.CASES["cuda"], []
    for model in cases.models:
        arch = read_arch(pathlib.Path(str(shape_options(model.shape)["model"])), model.overrides)
        steps = [(decode_spans(n, n_in), False) for n in cases.batches for n_in in cases.contexts]
        for spans, waits in [*steps, *((prefill_spans(n), True) for n in cases.prompts)]:
            one = fitting.Sample(name="", arch=arch, formats=formats_named("auto"), spans=spans, seconds=1, waits=waits)
            samples.append(msgspec.structs.replace(one, seconds=one.expected_s(truth)))
    losses: list[float] = []
    loss = fitting.sample_loss

    def counted(*arguments: Any) -> float:
        losses.append(loss(*arguments))
        return losses[-1]

    monkeypatch.setattr(fitting, "sample_loss", counted)
    flops = {"bfloat16": truth.flops_per_s["bfloat16"]}
    start = calibrate._start("NVIDIA H200", truth.read_bytes_per_s, flops, cases, "cuda")
    fitting.fit(start, samples, calibrate._knobs(flops, cases))
    assert len(losses) < 4000 and min(losses) < 0.01 * losses[0]
