"""`quire bench calibrate` on a CPU: a file that the planner reads. No figure is judged: machines that test are busy."""

from __future__ import annotations

import pathlib

import pytest

from quire.bench import calibrate
from quire.cli.command import run
from quire.planner.calibration import load_calibration

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
    assert run(["plan", "demo", "--gpu", "here", "--calibration", str(path)]) == 0
    assert "1 x CPU" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "calibrate", "--device", "cpu", "--output", "/nowhere/c.json"]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_machine_that_was_not_calibrated_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """`--gpu here`: reads and products are measured, the rest is assumed."""
    assert run(["plan", "demo", "--gpu", "here", "--workload", "offline"]) == 0
    text = capsys.readouterr().out
    assert "assumed: " in text and "`quire bench calibrate` does" in text and "quire serve demo" in text
