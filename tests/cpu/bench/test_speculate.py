"""`quire bench speculate`: pairs of engines, forced acceptance, the chart."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from quire.bench.draft_chart import CHANCES, MOST, panels, write_draft_chart
from quire.bench.draft_reason import spread_of, why_no_gain
from quire.bench.options import SpeculateOptions
from quire.bench.speculate import Pair, acceptance_of, measure_speculation
from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError
from quire.planner.drafts import DraftCosts, expected_tokens

SHORT = {"batch_sizes": [2], "input_len": 40, "output_len": 30, "num_iters": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(("acceptance", "low", "high"), [(1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.6, 0.3, 0.85)])
def test_acceptance_is_forced(monkeypatch: pytest.MonkeyPatch, acceptance: float, low: float, high: float) -> None:
    monkeypatch.setattr("quire.planner.drafts.DraftCosts.choose", lambda self, rates, most, *rest: [most] * len(rates))
    config = EngineConfig(speculative_config=NGRAM, max_num_seqs=16)
    rows, costs = measure_speculation(config, SpeculateOptions(**SHORT, acceptance=acceptance))
    (row,) = rows
    assert costs is not None
    assert row["drafting_spans"] and low - 0.01 <= float(str(row["acceptance"])) <= high + 0.01
    assert (float(str(row["tokens_per_step"])) > 4) == (acceptance == 1.0)


@pytest.mark.parametrize("rate", [0.0, 0.35, 0.8, 0.99])
@pytest.mark.parametrize("n", [1, 4, 8])
def test_acceptance_is_found_from_what_was_kept(rate: float, n: int) -> None:
    assert acceptance_of(expected_tokens(rate, n) - 1, n) == pytest.approx(rate, abs=1e-6)


def test_nothing_to_compare() -> None:
    drafts = EngineConfig(speculative_config={"method": "ngram"}, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="compared on one rank, and 2 are asked for: leave"):
        Pair.load(drafts, 0.0)
    with pytest.raises(ConfigError, match="add --speculative-config"):
        measure_speculation(EngineConfig(), SpeculateOptions())


def test_a_text_that_is_too_short(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text"
    text.write_text("few words")
    options = SpeculateOptions(text=str(text), input_len=64)
    with pytest.raises(ConfigError, match="tokens, --input-len is 64"):
        measure_speculation(EngineConfig(speculative_config=NGRAM), options)


def test_a_text_that_cannot_be_read_is_told_before_a_model_loads(tmp_path: pathlib.Path) -> None:
    config = EngineConfig(model="/nowhere", speculative_config=NGRAM)
    with pytest.raises(ConfigError) as error:
        measure_speculation(config, SpeculateOptions(text=str(tmp_path / "none")))
    assert error.value.message == f"--text '{tmp_path}/none' cannot be read: No such file or directory"
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8: "):
        measure_speculation(config, SpeculateOptions(text=str(tmp_path / "bytes")))


@pytest.mark.parametrize(("kind", "drawn"), [
    ("speculate", "over the number of drafts"), ("tradeoffs", "quality against speed"),
    ("throughput", "batch filling over time"),
])  # fmt: skip
def test_the_help_says_what_is_drawn(kind: str, drawn: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", kind, "--help"])
    pictures = [words for words in " ".join(capsys.readouterr().out.split()).split("--") if "Picture of" in words]
    assert len(pictures) == 1 and drawn in pictures[0]


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, report, chart = tmp_path / "text", tmp_path / "out.json", tmp_path / "chart.html"
    text.write_text("One two three four five six. " * 40)
    code = main([
        "bench", "speculate", "--speculative-config", json.dumps(NGRAM), "--text", str(text), "--batch-sizes", "1",
        "--input-len", "64", "--output-len", "24", "--num-iters", "1", "--output-json", str(report),
        "--plot", str(chart),
    ])  # fmt: skip
    assert code == 0 and "speedup" in capsys.readouterr().out
    results = json.loads(report.read_text())["results"]
    case = results["cases"][0]
    assert bool(case["why_no_gain"]) == (case["speedup"] - 1 <= case["speedup_spread"] or not case["drafting_spans"])
    assert case["same_tokens"] is True and results["costs"]["rows"][0] == 1
    assert chart.read_text().count("<circle") == 3


ROW = {"batch_size": 2, "acceptance": 0.19, "drafts_per_span": 2.0, "accepted_per_span": 0.25, "drafting_spans": 40,
       "speedup_spread": 0.004}  # fmt: skip
COSTS = DraftCosts((1, 2, 6), (1.0, 1.0, 1.5), guess_s=0.05, exposed_s=(0.1,), place_s=0.05)


def test_a_row_without_gain_says_why() -> None:
    """Of 40 + 50 steps of a sequence 40 had drafts; six rows, two places of two guesses, and what the host does."""
    said = why_no_gain(ROW | {"speedup": 0.9}, COSTS, 100)
    assert said == (
        "no gain: 44% of a sequence's steps had drafts, 2.0 each (acceptance 0.19); such a step keeps 1.25 tokens"
        " and takes 1.90 plain steps, and pays where it keeps more than it takes"
    )
    assert why_no_gain(ROW | {"speedup": 0.9}, None, 100) == said.partition(" and takes ")[0]
    assert why_no_gain(ROW | {"speedup": 1.3}, COSTS, 100) == ""


@pytest.mark.parametrize(("speedup", "spread", "is_none"), [
    (1.015, 0.004, False), (1.015, 0.016, True), (1.019, 0.02, True), (0.99, 0.001, True), (1.3, 0.4, True),
])  # fmt: skip
def test_a_gain_is_one_that_is_above_its_spread(speedup: float, spread: float, is_none: bool) -> None:
    said = why_no_gain(ROW | {"speedup": speedup, "speedup_spread": spread}, COSTS, 100)
    assert said.startswith("no gain: 44%") == bool(said) == is_none


def test_the_spread_is_the_standard_error_of_the_turns() -> None:
    assert spread_of([1.0, 1.1, 1.2, 1.3], [1.0] * 4) == pytest.approx(np.std([1, 1.1, 1.2, 1.3], ddof=1) / 2)
    assert spread_of([1.0, 2.0], [0.5, 1.0]) == 0.0 and spread_of([1.0], [0.5]) == 0.02


def test_a_row_without_drafts_says_what_one_would_take() -> None:
    row = ROW | {"speedup": 1.0, "drafting_spans": 0, "drafts_per_span": 0.0, "accepted_per_span": 0.0}
    said = "none was expected to pay: with 1 draft a sequence it takes 1.50 plain steps"
    assert why_no_gain(row, COSTS, 100).endswith(said)
    assert why_no_gain(row, None, 100).endswith("or none was expected to pay")
    assert why_no_gain(row, None, 100).startswith("no gain: no step had drafts")
    begin = "a speed-up of 1.07 that is not that of drafts: no step had drafts"
    assert why_no_gain(row | {"speedup": 1.07}, COSTS, 100).startswith(begin)


def test_the_chart_is_the_theory_and_the_points(tmp_path: pathlib.Path) -> None:
    row = {"batch_size": 1, "acceptance": 0.8, "drafts_per_span": 4.0, "accepted_per_span": 2.3, "speedup": 1.7}
    tokens, speed, most = panels([row], DraftCosts((1, 8), (1.0, 1.7), guess_s=0.1, exposed_s=(0.2,)))
    assert set(tokens.lines) == set(speed.lines) == set(CHANCES)
    assert tokens.lines[0.8][4] == pytest.approx(expected_tokens(0.8, 4))
    assert speed.lines[0.8][0] == 1.0 and speed.lines[0.8][4] == pytest.approx(expected_tokens(0.8, 4) / (1.4 + 0.6))
    assert tokens.points == [(4.0, 3.3, "batch 1, α 0.80")] and speed.points[0][:2] == (4.0, 1.7)
    assert len(tokens.lines[0.8]) == MOST + 1
    best = max((1 - 0.8 ** (n + 1)) / (1 - 0.8) / (0.1 * n + 1) for n in range(MOST + 1))
    assert most.numbers[4] == 0.1 and most.lines[0.8][4] == pytest.approx(best)
    assert most.points == [(0.1, 1.7, "batch 1, α 0.80")]
    with pytest.raises(ConfigError, match=r"must end with \.png or \.html"):
        write_draft_chart(str(tmp_path / "chart.txt"), [tokens], "title")
