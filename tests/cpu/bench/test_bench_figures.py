"""Arithmetic of the benchmarks: percentiles, datasets, arrivals, timelines, reports, plots."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import random
import statistics
import types

import numpy as np
import pytest

from quire.bench import plot
from quire.bench.datasets import WARM_UP, from_lengths, nano_vllm, read_lengths, uniform_lengths
from quire.bench.loadgen import arrival_offsets_s
from quire.bench.options import DatasetOptions
from quire.bench.plot import check_plot_path, write_plot
from quire.bench.report import build_report, command_line, write_report
from quire.bench.sse import EventParser
from quire.bench.summary import deviation, mean, percentile, summary
from quire.bench.timeline import Timeline, from_requests
from quire.bench.workloads import LATENCY_WORKLOADS, THROUGHPUT_WORKLOADS, throughput_dataset
from quire.core.errors import ConfigError


@pytest.mark.parametrize("n", [1, 2, 3, 10, 101])
def test_summary_equals_numpy(n: int) -> None:
    values = [random.Random(n).lognormvariate(0, 1) for _ in range(n)]
    for share in (0, 12.5, 50, 90, 99, 99.9, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share), rel=1e-12)
    assert mean(values) == pytest.approx(np.mean(values))
    assert deviation(values) == pytest.approx(np.std(values))
    assert summary("x_ms", values)["p90_x_ms"] == percentile(values, 90)


def test_nothing_measured_is_nan_not_zero() -> None:
    assert all(math.isnan(value) for value in summary("x", []).values())
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile([1.0], 101)


def test_nano_vllm_is_the_script_of_nano_vllm() -> None:
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    output_lens = [random.randint(100, 1024) for _ in range(256)]
    first, second = nano_vllm(0), nano_vllm(1)
    assert [request.prompt_token_ids for request in first] == prompts
    assert [request.output_len for request in first] == output_lens
    assert (sum(map(len, prompts)), sum(output_lens)) == (142_827, 133_966)
    assert [len(r.prompt_token_ids) for r in second] == [len(prompt) for prompt in prompts]
    assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(first, second, strict=True))


def test_repetitions_share_lengths_but_no_tokens() -> None:
    dataset = from_lengths([(64, 3), (32, 5)], vocab_size=1000, seed=1, prefix_len=16)
    runs = [dataset(repetition) for repetition in (WARM_UP, 0, 1)]
    for requests in runs:
        assert [(len(r.prompt_token_ids), r.output_len) for r in requests] == [(80, 3), (48, 5)]
        assert requests[0].prompt_token_ids[:16] == requests[1].prompt_token_ids[:16]
        assert max(max(r.prompt_token_ids) for r in requests) < 1000
    assert len({tuple(requests[0].prompt_token_ids[:16]) for requests in runs}) == 3
    assert dataset(0) == from_lengths([(64, 3), (32, 5)], 1000, 1, 16)(0)


def test_prefixes_are_shared_in_turn() -> None:
    requests = from_lengths([(4, 1)] * 6, 10_000, seed=0, prefix_len=8, n_prefixes=3)(0)
    heads = [tuple(request.prompt_token_ids[:8]) for request in requests]
    assert heads[:3] == heads[3:] and len(set(heads)) == 3


def test_random_lengths_stay_in_their_range() -> None:
    lengths = uniform_lengths(500, 100, 10, 0.5, seed=0)
    assert {50, 150} <= {n for n, _ in uniform_lengths(5000, 100, 10, 0.5, seed=0)}
    assert all(50 <= n <= 150 and 5 <= m <= 15 for n, m in lengths)
    assert uniform_lengths(3, 100, 10, 0.0, seed=0) == [(100, 10)] * 3


@pytest.mark.parametrize("content, message", [
    ("{", "lengths file"), ('{"input": [1]}', "output"), ('{"input": [1, 2], "output": [1]}', "equally many"),
    ('{"input": [0], "output": [1]}', "above 0"), ('{"input": [], "output": []}', "equally many"),
])  # fmt: skip
def test_bad_lengths_files_are_refused(tmp_path: pathlib.Path, content: str, message: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_lengths(str(path))


def test_lengths_files_are_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"seed": 0, "input": [5, 6, 7], "output": [1, 2, 3]}))
    assert read_lengths(str(path)) == [(5, 1), (6, 2), (7, 3)]
    assert read_lengths(str(path), 2) == [(5, 1), (6, 2)]
    with pytest.raises(ConfigError, match="3 requests, not 4"):
        read_lengths(str(path), 4)
    options = DatasetOptions(dataset_name="lengths", dataset_path=str(path), num_prompts=0)
    assert [r.output_len for r in options.dataset(100, 0)(0)] == [1, 2, 3]
    with pytest.raises(ConfigError, match="--dataset-path"):
        DatasetOptions(dataset_name="lengths").dataset(100, 0)


def test_workloads_are_what_their_names_say(tmp_path: pathlib.Path) -> None:
    assert (THROUGHPUT_WORKLOADS, LATENCY_WORKLOADS) == (("W1", "W2", "W3", "W5"), ("W4", "W6"))
    shared = throughput_dataset("W5", "")(0)
    assert len(shared) == 512 and {(len(r.prompt_token_ids), r.output_len) for r in shared} == {(2112, 64)}
    assert len({tuple(r.prompt_token_ids[:2048]) for r in shared}) == 1
    with pytest.raises(ConfigError, match="--dataset-path"):
        throughput_dataset("W3", "")


@pytest.mark.parametrize("burstiness, variation", [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_arrivals_have_the_asked_rate_and_burstiness(burstiness: float, variation: float) -> None:
    offsets_s = arrival_offsets_s(20_000, request_rate=50, burstiness=burstiness, seed=3)
    gaps_s = [b - a for a, b in itertools.pairwise(offsets_s)]
    assert offsets_s[0] == 0 and min(gaps_s) >= 0
    assert statistics.mean(gaps_s) == pytest.approx(1 / 50, rel=0.06)
    assert statistics.stdev(gaps_s) / statistics.mean(gaps_s) == pytest.approx(variation, rel=0.06)
    assert arrival_offsets_s(3, math.inf, 1.0, 0) == [0, 0, 0]


def test_events_are_found_for_every_cut() -> None:
    body = b': hello\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "data: 2"}\n\ndata: [DONE]\n\n'
    whole = EventParser().feed(body)
    assert whole == [b'{"a": 1}', b'{"b": "data: 2"}', b"[DONE]"]
    for size in range(1, len(body)):
        parser = EventParser()
        assert [p for i in range(0, len(body), size) for p in parser.feed(body[i : i + size])] == whole


def filling(n: int) -> Timeline:
    return Timeline.of_steps([
        types.SimpleNamespace(
            time_s=100 + i / 10, n_running=min(i, 8), n_waiting=max(9 - i, 0), n_tokens=i % 50, n_prefill_tokens=i % 2
        )
        for i in range(n)
    ])  # fmt: skip


def test_timeline_starts_at_zero_and_keeps_peaks_when_thinned() -> None:
    timeline = filling(1000).from_zero()
    assert timeline.time_s[0] == 0 and timeline.time_s[-1] == pytest.approx(99.9)
    thin = timeline.thinned(100)
    assert len(thin) == 100 and max(thin.n_tokens) == 49
    assert thin.thinned(500) == thin and len(Timeline().from_zero().thinned(10)) == 0


def test_timeline_of_a_load_counts_waiting_running_and_chunks() -> None:
    requests = [
        types.SimpleNamespace(start_s=10.0, chunk_times_s=[12.0, 13.0, 20.0]),
        types.SimpleNamespace(start_s=10.0, chunk_times_s=[11.0, 14.0]),
        types.SimpleNamespace(start_s=10.0, chunk_times_s=[]),
    ]
    timeline = from_requests(requests, n_bins=10)
    assert timeline.n_waiting == [2, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert timeline.n_running == [0, 1, 2, 2, 1, 1, 1, 1, 1, 1]
    assert sum(timeline.n_tokens) == 5 and timeline.n_tokens[9] == 1
    assert len(from_requests(requests[2:])) == 0


def test_report_says_how_it_was_made_and_hides_keys(tmp_path: pathlib.Path) -> None:
    config = {"api_key": "sesame", "max_num_seqs": 4}
    report = build_report("x", config, {"p99": math.nan, "n": 1}, filling(5000), ["/a/b/quire", "--api-key", "sesame"])
    write_report(str(tmp_path / "r.json"), report)
    text = (tmp_path / "r.json").read_text()
    read = json.loads(text)
    assert "sesame" not in text and read["command"] == "quire --api-key '***'"
    assert read["config"] == {"max_num_seqs": 4} and read["results"] == {"p99": None, "n": 1}
    assert {"commit", "hardware", "utc", "quire"} <= set(read) and read["hardware"]["n_cores"] >= 1
    assert len(read["timeline"]["time_s"]) <= 2000 and len(text.splitlines()) < 100
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(str(tmp_path / "none" / "r.json"), report)


def test_command_line_stars_secrets_only() -> None:
    words = ["quire", "serve", "--api-key=a", "--tokenizer", "b", "--max-num-batched-tokens", "3"]
    assert command_line(words) == "quire serve '--api-key=***' --tokenizer b --max-num-batched-tokens 3"


def test_plots_are_drawn(tmp_path: pathlib.Path) -> None:
    page, picture = tmp_path / "p.html", tmp_path / "p.png"
    write_plot(str(page), filling(3000), "run <1>")
    text = page.read_text()
    assert "run &lt;1&gt;" in text and "running" in text and text.count("<path") > 10
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    write_plot(str(picture), filling(30), "run")
    assert picture.read_bytes().startswith(b"\x89PNG")
    write_plot(str(page), Timeline(), "empty")


def test_plots_that_cannot_be_drawn_are_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for name in ("p.pdf", "p", str(tmp_path / "none" / "p.html")):
        with pytest.raises(ConfigError, match="--plot"):
            check_plot_path(name)
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_plot_path(str(tmp_path / "p.png"))
