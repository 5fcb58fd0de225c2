"""What the planner expects, beside recorded runs on one H200 (benchmarks/results/h200): the table of docs/plan.md.

Fitted by benchmarks/plan_fit.py: W4 of both shapes (of first tokens those at 1,024 and 8,192), W6 of the 8B shape at
32 and 256. All else is a prediction, but W1, W2 and W3 were looked at while the model was made: no blind test.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import msgspec
import pytest

from quire.bench.plan_check import Comparison, compare, cost_of_result, one_line
from quire.bench.shape import FOLDER
from quire.config.model import read_arch
from quire.core.errors import ConfigError
from quire.planner.accelerators import accelerator_named
from quire.planner.calibration import FOLDER as CALIBRATIONS
from quire.planner.calibration import load_calibration
from quire.planner.cost import calibrated
from quire.planner.operators import decode_spans

ROOT = pathlib.Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
LENGTHS = str(ROOT / "benchmarks" / "w3_lengths.json")
UNFITTED_06B = {1: 0.81, 8: 1.09, 32: 1.83, 128: 4.80, 256: 8.66}
"""Batch → ms a step of the 0.6B shape on W6, by an outside script."""


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


@functools.cache
def comparisons(name: str) -> list[Comparison]:
    recorded = result(name)
    return compare(recorded, cost_of_result(recorded), LENGTHS)


@pytest.mark.parametrize("name", ["w1", "w2", "w3", "w5"])
def test_throughput_is_within_five_per_cent(name: str) -> None:
    (found,) = comparisons(name)
    assert abs(found.error) <= 0.05, found.line()


@pytest.mark.parametrize("name", ["w4_8b", "w4_06b", "w6"])
def test_decode_steps_are_within_five_per_cent(name: str) -> None:
    steps = [one for one in comparisons(name) if one.what.endswith("decode step")]
    assert len(steps) == (5 if name == "w6" else 1)
    assert all(abs(one.error) <= 0.05 for one in steps), "\n".join(one.line() for one in steps)


def test_two_ranks_are_within_six_per_cent() -> None:
    """Nothing was fitted to them but sums timed alone. Without the ranks of the run it would be 60 % off."""
    steps = [one for one in comparisons("w6_tp2") if one.what.endswith("decode step")]
    assert len(steps) == 5 and all(abs(one.error) <= 0.06 for one in steps), "\n".join(one.line() for one in steps)


def expected_ms(batch: int, **ranks: object) -> dict[str, float]:
    """First token and decode step of a batch on these ranks, and the products of one of them."""
    recorded = result("w4_8b")
    case = {
        "batch_size": batch, "input_len": 512, "output_len": 64, "median_ttft_ms": 1.0, "decode_step_ms": 1.0,
        "breakdown": {"device_ms": {"linear": 1.0}},
    }  # fmt: skip
    config = recorded["config"] | ranks
    cost = cost_of_result(recorded | {"config": config})
    found = compare(recorded | {"config": config, "results": {"cases": [case]}}, cost)
    return {one.what.partition(": ")[2].strip(): one.expected for one in found}


def test_a_batch_is_divided_among_data_parallel_ranks() -> None:
    one, four = expected_ms(64), expected_ms(256, data_parallel_size=4)
    assert four == pytest.approx(one, rel=0.02) and 1.5 * one["decode step"] < expected_ms(256)["decode step"]
    assert expected_ms(5, data_parallel_size=4) == pytest.approx(expected_ms(2), rel=0.02)
    assert expected_ms(1, data_parallel_size=4) == expected_ms(1), "the others have nothing to do"


def test_throughput_of_data_parallel_ranks_is_not_guessed() -> None:
    recorded = result("w1")
    recorded["config"]["data_parallel_size"] = 2
    assert one_line(recorded) == ""
    with pytest.raises(ConfigError, match="of data_parallel_size = 2, and which rank had which request is not in it"):
        compare(recorded, cost_of_result(recorded), LENGTHS)


@pytest.mark.parametrize("name", ["w4_8b", "w4_06b", "w6"])
def test_first_tokens_are_within_fifteen_per_cent(name: str) -> None:
    firsts = [one for one in comparisons(name) if one.what.endswith("first token")]
    assert firsts and all(abs(one.error) <= 0.15 for one in firsts), "\n".join(one.line() for one in firsts)


def test_parts_of_a_step_are_where_the_profile_has_them() -> None:
    """Products and attention, of every batch of W6."""
    parts = [one for one in comparisons("w6") if one.what.endswith(("linear", "attention"))]
    assert len(parts) == 10 and all(abs(one.error) <= 0.10 for one in parts)


def step_ms(shape: str, batch: int, context: int) -> float:
    cost = calibrated(read_arch(FOLDER / shape), accelerator_named("h200"))
    return 1e3 * cost.step_s(decode_spans(batch, context))


@pytest.mark.parametrize("batch", sorted(UNFITTED_06B))
def test_another_shape_that_nobody_fitted(batch: int) -> None:
    assert step_ms("qwen3-0.6b", batch, 1024 + 64) == pytest.approx(UNFITTED_06B[batch], rel=0.10)


@pytest.mark.parametrize("run", [0, 1])
def test_lengths_that_nobody_fitted(run: int) -> None:
    """benchmarks/deterministic_speed.py: 256 in, 120 out, rows where no request asks for determinism."""
    recorded = result("deterministic")["runs"][run]
    shape = "qwen3-0.6b" if "0.6b" in recorded["command"] else "llama-3.1-8b"
    for row in recorded["rows"]:
        if not row["asking"]:
            assert step_ms(shape, row["batch_size"], 256 + 60) == pytest.approx(row["step_ms"], rel=0.10)


def test_a_benchmark_ends_with_one_line() -> None:
    assert one_line(result("w1")).startswith("expected: W1: output ")
    given = result("w6") | {"config": {"model": "org/of-the-hub", "max_model_len": 4096}}
    assert one_line(given) == "", "nobody said what it is"
    assert one_line(given, read_arch(FOLDER / "llama-3.1-8b")) == one_line(result("w6")) != ""


@pytest.mark.parametrize("model", ["shape:llama-3.1-8b", "/elsewhere/quire/bench/shapes/llama-3.1-8b"])
def test_a_report_names_a_shape_as_it_was_given(model: str) -> None:
    recorded = result("w6")
    given = recorded | {"config": recorded["config"] | {"model": model}}
    assert one_line(given) == one_line(recorded) != ""


@pytest.mark.parametrize("model", ["org/name", "shape:no-such", "/no/such/folder", "/elsewhere/llama-3.1-8b"])
def test_a_model_that_is_not_here_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=f"of the model '{model}', which is not a folder here: name MODEL"):
        cost_of_result({"config": {"model": model}}, accelerator_named("h200"))


def test_a_quantised_checkpoint_is_not_taken_for_one_in_bfloat16() -> None:
    coded = {"quantization_config": {"quant_method": "mxfp4"}}
    config = {"model": "shape:gpt-oss-20b", "hf_overrides": coded, "quantization": "auto"}
    kept = cost_of_result({"config": config}, accelerator_named("h200"))
    assert kept.timer.formats.weights.name == "mxfp4"
    decoded = cost_of_result({"config": config | {"quantization": "none"}}, accelerator_named("h200"))
    assert decoded.timer.formats.weights.name == "bfloat16"
    assert kept.timer.parts.weights_bytes < 0.4 * decoded.timer.parts.weights_bytes
    assert one_line(result("w6") | {"hardware": {"gpus": []}}) == "", "no calibration of that machine"


def test_a_worse_calibration_is_seen() -> None:
    """What the tests above would say to attention that reads at half its rate."""
    recorded = result("w6")
    good = load_calibration(CALIBRATIONS / "h200.json")
    bad = msgspec.structs.replace(good, attention=msgspec.structs.replace(good.attention, bytes_share=0.5))
    found = compare(recorded, cost_of_result(recorded, accelerator_named("h200"), bad))
    assert max(abs(one.error) for one in found if one.what.endswith("decode step")) > 0.3
