"""The view of a benchmark on a GPU: kernels inside captured graphs are seen, on the host's clock."""

from __future__ import annotations

import json
import math
import pathlib

import pytest
import torch
from family_cases import checkpoint_of

from quire.cli.main import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("case", "kind"), [("mixtral", "experts"), ("mamba2", "state")])
def test_experts_and_states_are_parts(tmp_path: pathlib.Path, case: str, kind: str) -> None:
    checkpoint_of(case, tmp_path)
    report = tmp_path / "r.json"
    words = ["bench", "latency", str(tmp_path), "--device", "cuda", "--input-len", "32", "--output-len", "64"]
    words += ["--num-iters", "2", "--max-model-len", "128", "--skip-tokenizer-init", "--output-json", str(report)]
    assert main(words) == 0
    (row,) = json.loads(report.read_text())["results"]["cases"]
    assert row["breakdown"]["device_ms"][kind] > 0


def test_latency_of_the_demo_model(tmp_path: pathlib.Path) -> None:
    report, trace = tmp_path / "r.json", tmp_path / "t.json"
    words = ["bench", "latency", "--device", "cuda", "--batch-size", "4", "--output-len", "64", "--num-iters", "2"]
    words += ["--num-gpu-blocks-override", "600", "--output-json", str(report), "--profile", str(trace)]
    assert main(words) == 0
    (case,) = json.loads(report.read_text())["results"]["cases"]
    assert all(0 < row["share"] <= 1.1 for row in case["limits"].values())
    found = case["breakdown"]
    for side in ("device_ms", "host_ms"):
        assert math.fsum(found[side].values()) == pytest.approx(found["step_ms"])
    assert found["device_ms"]["attention"] > 0 and found["device_ms"]["linear"] > 0
    assert found["device_ms"]["gaps"] < found["step_ms"], "no kernel lies inside the window: the clocks differ"
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = [names[event["tid"]] for event in events if event["ph"] == "X"]
    assert set(rows) == {"host", "device"}
    assert rows.count("device") > 20 * found["n_steps"], "launches inside a graph are there"
