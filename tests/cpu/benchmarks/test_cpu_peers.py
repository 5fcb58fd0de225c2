"""The comparison on a CPU: its loop and arithmetic, the model files that both sides read, a child process."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence

import pytest
import torch

from benchmarks.peers import models
from benchmarks.peers.lines import Row as Token
from benchmarks.peers.lines import Worker, WorkerError, continuous
from benchmarks.peers.table import HF, IK, LLAMA, Row, equal, measures
from benchmarks.peers.tool import IkBench
from benchmarks.quantization_quality import load
from quire.compute.device.cpu import CpuDevice

TABLE = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     32 |    8 |   1280 |    4.000 |   256.00 |    2.000 |   128.00 |    6.000 |   213.33 |
"""
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Engine:
    """A peer that writes down what it is asked; its tokens are slot numbers."""

    def __init__(self) -> None:
        self.steps: list[list[Token]] = []
        self.freed: list[int] = []

    def step(self, rows: Sequence[Token]) -> list[int]:
        self.steps.append(list(rows))
        return [slot for _, _, slot, wanted in rows if wanted]


def test_the_loop_serves_every_request_in_its_slot_and_order() -> None:
    engine = Engine()
    figures = continuous(engine.step, engine.freed.append, [[5, 6, 7], [8, 9], [4]], [2, 3, 2], slots=2, max_tokens=16)
    assert engine.steps == [
        [(5, 0, 0, False), (6, 1, 0, False), (7, 2, 0, True), (8, 0, 1, False), (9, 1, 1, True)],
        [(0, 3, 0, True), (1, 2, 1, True)],
        [(1, 3, 1, True), (4, 0, 0, True)],
        [(0, 1, 0, True)],
    ]
    assert engine.freed == [0, 1, 0]
    assert figures["n_out"] == 7 and figures["n_decoded"] == 3
    assert 0 < figures["first_s"] + figures["decode_s"] < figures["total_s"]


def test_a_prompt_that_does_not_fit_the_step_waits() -> None:
    engine = Engine()
    continuous(engine.step, engine.freed.append, [[1] * 6, [2] * 6], [2, 1], slots=2, max_tokens=8)
    assert [len(step) for step in engine.steps] == [6, 7]


def test_rows_say_whether_their_target_is_met() -> None:
    row = Row("m", "8-bit", "decode", LLAMA, least_ratio=1.35, pairs=[(10, 15), (20, 26), (10, 14)]).close()
    assert row.medians == (10, 15) and row.ratio == pytest.approx(1.4) and row.target.endswith(" met")
    assert Row("m", "", "", "", least_ratio=1.5, pairs=[(10, 14)]).close().target.endswith("not met")
    start = Row("demo", "bf16", "start", LLAMA, unit="s", limit=2.0, pairs=[(0.5, 2.5)]).close()
    assert start.ratio == pytest.approx(0.2) and start.target.startswith("<= 2 s") and "not met" in start.target
    assert "not met" in Row("demo", "", "", "", limit=1500.0, pairs=[(1, 1400)]).close().target


def test_measures_have_the_targets_of_every_peer(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"input": [40] * 70, "output": [4, 2] * 35}))
    found = {one.name: one for one in measures("qwen3-0.6b", False, str(path), 128)}
    assert found["16 sequences"].targets[("8-bit", IK)] == 3.0 and not found["4 sequences"].targets
    assert found["traffic"].lengths[:2] == ((10, 1), (10, 1)) and len(found["traffic"].lengths) == 64
    assert found["traffic"].targets[("bf16", HF)] == 2.0 and found["decode, core busy"].busy
    answer = {"first_s": 2.0, "decode_s": 4.0, "n_decoded": 40, "total_s": 8.0, "n_out": 32}
    rates = [one.rate(answer) for one in (found["decode"], found["prefill 512"], found["traffic"])]
    assert rates == [10.0, 256.0, 4.0]


def test_the_table_of_the_tool_is_read(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "bench"
    script.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/options\ncat <<'END'\n{TABLE}END\n")
    script.chmod(0o755)
    bench = IkBench(str(script), "m.gguf", 2)
    answer = bench.ask(op="run", prompts=[[1] * 128] * 8, output_lens=[32] * 8, slots=8)
    assert equal(8, 128, 32, {}).rate(answer) == 128.0 and answer["first_s"] == 4.0
    assert (tmp_path / "options").read_text().split()[-6:] == ["-npp", "128", "-ntg", "32", "-npl", "8"]
    script.write_text("#!/bin/sh\necho no such model; exit 3\n")
    with pytest.raises(WorkerError, match="ended with 3: no such model"):
        bench.ask(op="run", prompts=[[1]], output_lens=[1])


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.2-1b"])
def test_both_files_hold_the_same_weights(shape: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back by our GGUF loader, which the tests of GGUF compare with transformers."""
    config = json.loads((models.FOLDER / shape / "config.json").read_text()) | SMALL
    (tmp_path / "shapes" / shape).mkdir(parents=True)
    (tmp_path / "shapes" / shape / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "FOLDER", tmp_path / "shapes")
    folder = models.checkpoint(tmp_path, shape, tmp_path)
    ids = torch.arange(1, 65)[None]
    ours, theirs = (load(path, "none", torch.float32, 64, CpuDevice(1))(ids) for path in (folder, folder / "BF16.gguf"))
    assert ours.std() > 0.01 and torch.allclose(ours, theirs, atol=1e-5)


def test_a_child_that_ends_is_reported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(
        "from benchmarks.peers.lines import serve\n"
        "def answer(op):\n    print('noise')\n"
        "    if op == 'end':\n        raise SystemExit('out of paper')\n    return op\n"
        "serve(lambda size: ({'size': size}, answer))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    worker = Worker(sys.executable, "child", tmp_path / "log", size=3)
    assert worker.ready == {"size": 3} and worker.ask(op="run") == "run"
    with pytest.raises(WorkerError, match=r"ended with 1(.|\n)*noise(.|\n)*out of paper"):
        worker.ask(op="end")
