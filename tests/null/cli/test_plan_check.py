"""`quire plan --check`: what was expected beside recorded runs, and what is no such run."""

from __future__ import annotations

import json
import pathlib

import pytest
from test_plan import RESULTS, ROOT, bar, planned, refused

from quire.cli.command import run
from quire.planner.error_bar import TENSOR


def test_a_result_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "--check", str(RESULTS / "w6.json"))
    assert "256 x 1024 in, 128 out: decode step" in text and "linear" in text and "worst:" in text
    assert text.endswith(f"first token, +7.6 %, within the {bar()} of its plans\n"), "the bar that a plan prints"
    several = planned(capsys, "--check", str(RESULTS / "w6_tp2.json"))
    assert several.endswith(f"first token, -10.0 %, within the {bar(TENSOR)} of its plans\n")
    rows = json.loads(planned(capsys, "--check", str(RESULTS / "w5.json"), "--json"))
    assert rows[0]["unit"] == "tok/s" and abs(rows[0]["error"]) < 0.05


def test_a_result_that_is_beyond_its_error_bar_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """Half as fast as expected is 100 % off, as the time is twice as long. The answer is no."""

    def answer_of(report: object) -> str:
        (tmp_path / "slow.json").write_text(json.dumps(report))
        assert run(["plan", "--check", str(tmp_path / "slow.json"), "--json"]) == 1
        capsys.readouterr()
        assert run(["plan", "--check", str(tmp_path / "slow.json")]) == 1
        return capsys.readouterr().out

    report = json.loads((RESULTS / "w5.json").read_text())
    report["results"]["output_tokens_per_second"] /= 2
    assert f"beyond the {bar()} of its plans" in answer_of(report)
    report["results"]["output_tokens_per_second"] *= 2 / 1.12
    assert f"beyond the {bar()} of its plans" in answer_of(report)


def test_lengths_that_are_elsewhere_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "--check", str(RESULTS / "w3.json"))
    assert (
        "of W3 were those of 'benchmarks/w3_lengths.json', which is not here: give the file by --dataset-path" in said
    )
    monkeypatch.chdir(ROOT)
    assert "within the" in planned(capsys, "--check", str(RESULTS / "w3.json"))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no JSON"), ("[" * 100_000, "is no JSON"),
        ("{}", "no report"), ('{"benchmark": "kernels", "config": {"model":'
        ' "shape:qwen3-0.6b"}, "results": {}, "hardware": {"gpus": [{"name": "NVIDIA H200"}]}}', "bench kernels"),
        ('{"benchmark": "serve", "config": {}, "results": {}}', "see results.expected there"),
        ('{"benchmark": "latency", "config": {"model": "x"}, "results": {"cases": [{"batch_size": 1, "input_len": 8,'
        ' "output_len": 8, "median_ttft_ms": 1.5}]}}', "a CPU"),
        ('{"benchmark": "latency", "config": {}, "results": {}}', "is damaged, or of another version of quire bench:"
        " Object missing required field `cases` - at `$.results`"),
        ('{"benchmark": "latency", "config": {}, "results": {"cases": []}}', "length >= 1"),
        ('{"benchmark": "latency", "config": {"model": "shape:qwen3-0.6b"}, "hardware": {"gpus": [{"name": "NVIDIA'
        ' H200"}]}, "results": {"cases": [{"batch_size": 2, "input_len": 8, "output_len": 1, "median_ttft_ms": 1}]}}',
        "several requests at once and no decode step"),
        ('{"benchmark": "latency", "config": [], "results": {}}', "got `array` - at `$.config`"),
        ('{"benchmark": "throughput", "config": {}, "results": {"output_tokens_per_second": 0}}', "> 0.0"),
        ('{"benchmark": "sweep", "config": {}, "results": {}, "hardware": null}', "at `$.hardware`")],
)  # fmt: skip
def test_what_is_no_result(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "r.json").write_text(text)
    assert message in refused(capsys, "--check", str(tmp_path / "r.json"))


def test_a_result_is_checked_with_its_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "demo", "--check", str(RESULTS / "w1.json"))
    assert (
        "'quire/bench/shapes/qwen3-0.6b' with 596,049,920 parameters, and 'demo' has 8,917,248:" in said
    )
    assert "worst: W1" in planned(capsys, "shape:qwen3-0.6b", "--check", str(RESULTS / "w1.json"))


def test_a_result_of_a_model_that_is_not_here_is_taken_for_that_of_the_one_named(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    result = json.loads((RESULTS / "w1.json").read_text())
    result["config"]["model"] = "shape:gone-1b"
    (tmp_path / "r.json").write_text(json.dumps(result))
    said = refused(capsys, "--check", str(tmp_path / "r.json"))
    assert "name MODEL, as in quire plan shape:NAME --check RESULT.json" in said
    assert "worst: W1" in planned(capsys, "shape:qwen3-0.6b", "--check", str(tmp_path / "r.json"))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "shape:llama-3.1-8b"])
def test_a_model_in_the_place_of_the_result_is_told_its_own(capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = refused(capsys, "--check", name)
    assert f"--check '{name}' is a model" in said and "as quire plan shape:llama-3.1-8b --check RESULT.json" in said
    said = refused(capsys, "llama-3.1-8b", "--check", str(RESULTS / "w6.json"))
    assert "did you mean shape:llama-3.1-8b?" in said


@pytest.mark.parametrize("model", ["", "demo"])
def test_results_of_the_demo_are_known(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, model: str) -> None:
    case = {"batch_size": 1, "input_len": 8, "output_len": 8, "median_ttft_ms": 1.5}
    result = {
        "benchmark": "latency", "config": {"model": model}, "hardware": {"gpus": [{"name": "NVIDIA H200"}]},
        "results": {"cases": [case]},
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps(result))
    assert "1 x 8 in, 8 out: first token" in planned(capsys, "--check", str(tmp_path / "r.json"))
    said = refused(capsys, "shape:qwen3-0.6b", "--check", str(tmp_path / "r.json"))
    assert "with 8,917,248 parameters, and 'shape:qwen3-0.6b' has 596,049,920: leave MODEL out" in said
