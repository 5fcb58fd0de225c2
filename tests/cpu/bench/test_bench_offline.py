"""Throughput and latency: the arithmetic on an engine whose times are known, then the commands on the demo model."""

from __future__ import annotations

import json
import pathlib
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from quire.bench.datasets import TOKEN_LIMIT, from_lengths
from quire.bench.loadgen import counted
from quire.bench.offline import check_batches, decode_step_times_s, measure_latency, measure_throughput
from quire.bench.options import LatencyOptions, ThroughputOptions
from quire.bench.timeline import Timeline
from quire.bench.workloads import LatencyCase
from quire.cli.main import main
from quire.core.errors import ConfigError, EngineError
from quire.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.core.sampling import SamplingParams
from quire.core.ticker import Ticker

Step = types.SimpleNamespace


class FixedEngine:
    """Stands in for `LLM`: every call takes `call_s`; first token after 2 s, then 0.1 s a token, on its own clock."""

    def __init__(self, call_s: float = 0.0, n_missing: int = 0) -> None:
        self.config = types.SimpleNamespace(seed=0)
        self.on_step: Callable[[Step], None] | None = None
        self.call_s = call_s
        self.n_missing = n_missing
        self.calls: list[tuple[list[list[int]], list[SamplingParams]]] = []

    def generate(
        self, prompts: list[dict[str, list[int]]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        self.calls.append(([prompt["prompt_token_ids"] for prompt in prompts], params))
        n = len(prompts)
        assert self.on_step is not None
        for i in range(4):
            self.on_step(Step(time_s=50 + i * 0.1, n_running=n, n_waiting=0, n_tokens=n, n_prefill_tokens=int(i == 0)))
        time.sleep(self.call_s)
        return [self._output(one.max_tokens or 0) for one in params]

    def expert_loads(self) -> list[list[int]]:
        """Of one layer with two experts: while it starts both are chosen, and then the first alone."""
        return [[len(self.calls) + 7, 7]]

    def _output(self, n: int) -> RequestOutput:
        ids = [0] * (n - self.n_missing)
        times = RequestMetrics(arrival_s=10.0, first_token_s=12.0, finished_s=12.0 + 0.1 * (n - 1))
        return RequestOutput("r", None, [], [CompletionOutput(0, "", ids)], True, metrics=times)


def test_throughput_is_tokens_over_the_median_time() -> None:
    engine = FixedEngine(call_s=0.05)
    options = ThroughputOptions(num_repeats=3, num_warmups=2, warmup_output_len=4)
    results, timeline = measure_throughput(engine, from_lengths([(5, 8), (7, 2)], 100, 0), 0.6, options)  # type: ignore[arg-type]
    elapsed_s = results["elapsed_time"]
    assert isinstance(elapsed_s, float) and 0.05 <= elapsed_s < 5
    assert sorted(results["elapsed_times"])[1] == elapsed_s  # type: ignore[call-overload]
    assert results["output_tokens_per_second"] == pytest.approx(10 / elapsed_s)
    assert results["tokens_per_second"] == pytest.approx(22 / elapsed_s)
    assert results["requests_per_second"] == pytest.approx(2 / elapsed_s)
    assert len(timeline) == 4 and engine.on_step is None
    assert results["expert_imbalance"] == 2.0


def test_limits_are_of_the_experts_that_the_timed_passes_chose() -> None:
    seen: list[list[list[int]]] = []
    view: Any = types.SimpleNamespace(
        probe_again=lambda: None,
        limits_s=lambda records, loads: seen.append(loads) or [0.5] * len(records),
        profile=lambda llm, run, n_steps, loads: seen.append(loads) or "parts",
        ceilings=dict,
    )
    options = ThroughputOptions(num_repeats=3, num_warmups=2)
    results, _ = measure_throughput(FixedEngine(), from_lengths([(5, 8)], 100, 0), 0.6, options, view)  # type: ignore[arg-type]
    assert seen == [[[3, 0]]] * 2, "without what was counted before them"
    assert results["limits"]["output_tokens_per_second"]["limit"] == 8 / 2  # type: ignore[index]


def test_every_pass_has_fresh_tokens_and_its_own_lengths() -> None:
    engine = FixedEngine()
    options = ThroughputOptions(num_repeats=2, num_warmups=2, warmup_output_len=4)
    measure_throughput(engine, from_lengths([(5, 8), (7, 2)], 10_000, 0), 0.6, options)  # type: ignore[arg-type]
    prompts = [tuple(prompt) for call, _ in engine.calls for prompt in call]
    assert len(set(prompts)) == len(prompts) == 8
    assert [[one.max_tokens for one in params] for _, params in engine.calls] == [[4, 2], [4, 2], [8, 2], [8, 2]]
    assert all(one.ignore_eos and one.temperature == 0.6 for _, params in engine.calls for one in params)


def test_a_short_output_spoils_the_measurement_loudly() -> None:
    with pytest.raises(EngineError, match="8 output tokens got 7"):
        measure_throughput(FixedEngine(n_missing=1), from_lengths([(5, 8)], 100, 0), 1.0, ThroughputOptions())  # type: ignore[arg-type]


def test_batches_that_cannot_run_together_are_refused() -> None:
    llm: Any = types.SimpleNamespace(max_num_seqs=64)
    check_batches(llm, [1, 64], "--batch-size")
    with pytest.raises(ConfigError, match="--batch-size 100,000 is more than the 64 sequences that run at once"):
        check_batches(llm, [1, 100_000], "--batch-size")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_answers_of_a_server_are_counted(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a bar on a terminal, else by lines of the log."""
    tickers: list[Ticker] = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    advance = Ticker.advance
    monkeypatch.setattr(Ticker, "advance", lambda self, n: (tickers.append(self), advance(self, n)))
    with counted(3) as on_done:
        on_done()
        on_done()
    assert [one.done for one in tickers] == ([] if is_terminal else [2, 2])


def test_latency_row() -> None:
    engine = FixedEngine(call_s=0.02)
    cases = [LatencyCase(3, 4, 11), LatencyCase(1, 4, 1)]
    rows, _ = measure_latency(engine, cases, TOKEN_LIMIT, LatencyOptions(num_iters=4, num_iters_warmup=1))  # type: ignore[arg-type]
    assert len(engine.calls) == 10 and len({tuple(prompts[0]) for prompts, _ in engine.calls}) == 10
    assert rows[0]["batch_size"] == 3 and rows[0]["p99_ttft_ms"] == pytest.approx(2000)
    assert rows[0]["median_tpot_ms"] == pytest.approx(100) and rows[0]["decode_step_ms"] == pytest.approx(100)
    assert rows[0]["n_decode_steps"] == 4 * 2 and rows[0]["expert_imbalance"] == 2.0
    assert 20 <= rows[0]["median_latency_ms"] < 500  # type: ignore[operator]
    assert rows[1]["mean_tpot_ms"] != rows[1]["mean_tpot_ms"], "one token has no time between tokens"


def test_decode_steps_are_full_and_pure() -> None:
    timeline = Timeline(
        time_s=[0.0, 1.0, 1.1, 1.3, 1.6, 2.0], n_running=[2] * 6, n_waiting=[0] * 6,
        n_tokens=[9, 2, 2, 2, 1, 2], n_prefill_tokens=[9, 0, 0, 1, 0, 0],
    )  # fmt: skip
    assert decode_step_times_s(timeline, 2) == [pytest.approx(0.1)]


ENGINE = ("--num-gpu-blocks-override", "600", "--num-threads", "1", "--device", "cpu")


def test_throughput_command_on_the_demo_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, page = tmp_path / "r.json", tmp_path / "p.html"
    words = ["bench", "throughput", "--num-prompts", "6", "--input-len", "40", "--output-len", "5", *ENGINE]
    assert main([*words, "--output-json", str(report), "--plot", str(page)]) == 0
    assert "output_tokens_per_second" in capsys.readouterr().out
    read = json.loads(report.read_text())
    assert read["results"]["total_output_tokens"] == 30 and read["results"]["total_input_tokens"] == 240
    assert max(read["timeline"]["n_running"]) > 1 and sum(read["timeline"]["n_tokens"]) == 240 + 30 - 6
    assert "<svg" in page.read_text()


def test_latency_command_on_a_named_model(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "r.json"
    words = ["bench", "latency", "demo", "--batch-size", "2", "--output-len", "6", "--num-iters", "2"]
    assert main([*words, *ENGINE, "--num-iters-warmup", "0", "--output-json", str(report)]) == 0
    read = json.loads(report.read_text())
    assert read["config"]["model"] == "demo", "MODEL is the same as --model"
    (case,) = read["results"]["cases"]
    assert case["batch_size"] == 2 and case["n_decode_steps"] > 0
    assert 0 < case["median_ttft_ms"] < case["median_latency_ms"]
