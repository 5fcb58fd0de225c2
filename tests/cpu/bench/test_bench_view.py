"""The view of a benchmark on the demo model: share of the limit, breakdown, trace."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from family_cases import checkpoint_of

from quire.bench.breakdown import breakdown
from quire.bench.ceilings import higher, probe
from quire.bench.kernels.timing import timer
from quire.bench.limit import lines
from quire.bench.profiling import MAX_STEPS, capture, read_kernels
from quire.cli.main import main
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM
from quire.kernels import moe, native, state
from quire.planner.calibration import Ceilings

ENGINE = ("--num-gpu-blocks-override", "600", "--num-threads", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(num_gpu_blocks_override=600, num_threads=1, device="cpu", seed=3)
    yield engine
    engine.shutdown()


def test_probe_finds_ceilings_of_this_machine() -> None:
    torch.set_num_threads(1)
    found = probe(timer("cpu"), [torch.bfloat16, torch.int8])
    assert 1e9 < found.read_bytes_per_s < 1e12 and list(found.flops_per_s) == ["bfloat16", "int8"]
    assert all(1e9 < rate < 1e14 for rate in found.flops_per_s.values())
    one, other, best = (
        Ceilings(device="a", read_bytes_per_s=reads, flops_per_s={"bfloat16": rate})
        for reads, rate in [(1.0, 5.0), (2.0, 3.0), (2.0, 5.0)]
    )
    assert higher(one, other) == best


def check_parts(breakdown: dict[str, Any]) -> None:
    for side in ("device_ms", "host_ms"):
        assert math.fsum(breakdown[side].values()) == pytest.approx(breakdown["step_ms"])
        assert all(ms >= -1e-6 for ms in breakdown[side].values()), breakdown[side]
    whole = ["native step"] if native.library() is not None else []
    assert list(breakdown["device_ms"]) == ["attention", "linear", "other kernels", *whole, "gaps"]
    assert list(breakdown["host_ms"]) == ["schedule", "submit", "wait", "commit", "other"]
    assert breakdown["device_ms"]["native step" if whole else "linear"] > 0


def test_latency_command_shows_limit_breakdown_and_trace(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, trace = tmp_path / "r.json", tmp_path / "t.json"
    words = ["bench", "latency", "--batch-size", "2", "--output-len", "40", "--num-iters", "2", *ENGINE]
    words += ["--num-iters-warmup", "1", "--output-json", str(report), "--profile", str(trace)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "gaps" in out and "ceilings in this run" in out
    results = json.loads(report.read_text())["results"]
    assert results["ceilings"]["read_bytes_per_second"] > 1e9
    (case,) = results["cases"]
    assert list(case["limits"]) == ["decode_step_ms", "first_token_ms", "latency_ms"]
    assert all(line in out for line in lines(case["limits"], has_experts=False))
    for row in case["limits"].values():
        assert row["limit"] > 0 and row["share"] == pytest.approx(row["limit"] / row["attained"])
    check_parts(case["breakdown"])
    assert case["breakdown"]["n_steps"] == 20 and case["breakdown"]["n_tokens"] == 2.0, "half of about 40 steps"
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["tid"] for event in events if event["ph"] == "X"}
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"host", "device"} and len(rows) == 2


def test_throughput_command_shows_them_too(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    words = ["bench", "throughput", "--num-prompts", "5", "--input-len", "30", "--output-len", "4", *ENGINE]
    assert main([*words, "--num-warmups", "0", "--output-json", str(report)]) == 0
    out = capsys.readouterr().out
    results = json.loads(report.read_text())["results"]
    row = results["limits"]["output_tokens_per_second"]
    assert row["share"] > 0 and row["attained"] == pytest.approx(results["output_tokens_per_second"])
    assert all(line in out for line in lines(results["limits"], has_experts=False))
    check_parts(results["breakdown"])
    assert results["breakdown"]["n_tokens"] > 5, "too few steps for a middle: prompts are in"


def test_no_view_is_as_before(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    words = ["bench", "latency", "--output-len", "2", "--num-iters", "1", "--num-iters-warmup", "0", "--no-view"]
    assert main([*words, *ENGINE, "--output-json", str(report)]) == 0
    assert "limit" not in capsys.readouterr().out and list(json.loads(report.read_text())["results"]) == ["cases"]


def test_a_pass_ends_with_its_window_and_the_next_is_clean(llm: LLM) -> None:
    """Two passes that are cut off, then a whole one on the same engine."""
    params = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)

    def run() -> None:
        llm.generate([{"prompt_token_ids": list(range(5, 25))}], params, use_tqdm=False)

    for _ in range(2):
        found = capture(llm, run, 200, "cpu")
        assert len(found.steps) == MAX_STEPS and len(found.records) < 130, "the rest of the pass was left out"
        middle = found.kernels[len(found.kernels) // 2]
        assert found.begin_s < middle.start_s < found.end_s, "kernels and steps are on one clock"
        assert all(record.n_tokens == 1 for record in found.steps)
        names = {kernel.name for kernel in found.kernels}
        assert ("quire_fused_step" in names) == (native.library() is not None)
    assert llm.on_step is None and not llm.stats().n_running
    short = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], short, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(("case", "kind"), [("qwen2_moe", "experts"), ("mamba2", "state")])
def test_experts_and_states_are_told_apart(tmp_path: pathlib.Path, case: str, kind: str) -> None:
    """Whatever operators they are made of; afterwards calls have no names again."""
    checkpoint_of(case, tmp_path)
    engine = LLM(
        str(tmp_path), num_gpu_blocks_override=20, num_threads=1, device="cpu", dtype="float32",
        skip_tokenizer_init=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    selects = moe.op.select, state.op.select
    found = breakdown(
        capture(engine, lambda: engine.generate([[5, 6, 7]], params, use_tqdm=False), 40, "cpu")
    ).device_ms
    engine.shutdown()
    assert found[kind] > 0 and {"experts", "state"} & found.keys() == {kind}
    assert (moe.op.select, state.op.select) == selects


def test_kernels_of_a_gpu_trace() -> None:
    """What torch.profiler writes for a GPU: kernels and copies count, launches and annotations do not."""
    events = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 1, "tid": 9, "ts": 5.0, "dur": 3.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "pid": 0, "tid": 7, "ts": 30.0, "dur": 1.5},
        {"ph": "X", "cat": "kernel", "name": "nvjet", "pid": 0, "tid": 7, "ts": 10.0, "dur": 4.0},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 90.0},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 90.0},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7"}},
    ]
    trace = {"baseTimeNanoseconds": 1_790_000_000_000_000_000, "traceEvents": events}
    first, second = read_kernels(trace, "cuda", 1_790_000_000.0 - 100.0)
    assert (first.name, second.name) == ("nvjet", "Memcpy DtoH")
    assert first.start_s == pytest.approx(100 + 10e-6, abs=1e-9) and first.end_s - first.start_s == pytest.approx(4e-6)
