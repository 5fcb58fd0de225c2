"""The breakdown of a benchmark of two ranks: what they sum, and how long rank 0 waits, is told apart."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

from quire.cli.main import main


def test_two_ranks_have_a_breakdown(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    words = ["bench", "latency", "--tensor-parallel-size", "2", "--device", "cpu", "--num-threads", "1"]
    words += ["--num-gpu-blocks-override", "100", "--input-len", "8", "--output-len", "12", "--num-iters", "1"]
    assert main([*words, "--num-iters-warmup", "0", "--output-json", str(report)]) == 0
    assert "sums over ranks" in capsys.readouterr().out
    (case,) = json.loads(report.read_text())["results"]["cases"]
    found = case["breakdown"]
    parts = found["device_ms"]
    assert math.fsum(parts.values()) == pytest.approx(found["step_ms"]) and min(parts.values()) >= -1e-6
    assert parts["sums over ranks"] > 0 and parts["waiting for ranks"] >= 0 and parts["linear"] > 0
    (sums,) = [kernel for kernel in found["kernels"] if kernel["name"] == "quire_ranks_all_reduce"]
    assert sums["calls"] == 17, "two a layer, and the embedding"
    assert found["limits_ms"]["linear"] > 0, "of a rank"
