"""Experiments of several ranks: what they count, and their arithmetic on ideal times. Engines are in `tests/dist`."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import sys
import time

import pytest
import torch

from benchmarks import rank_alone, rank_plots
from benchmarks.counted_calls import Counts, counted, wire_bytes
from benchmarks.pipeline_bubbles import Measured, formula, idle, rows_of, simulated
from benchmarks.rank_engines import table
from benchmarks.stage_idle import StageIdle
from benchmarks.tensor_parallel_table import COLUMNS, lengths_of, published
from quire.bench.report import build_report
from quire.compute.dist.comm import Reduction
from quire.compute.dist.gloo import GlooComm
from quire.compute.facts import WorkerFacts
from quire.compute.worker import Worker
from quire.engine import workers


def on_two_ranks(folder: pathlib.Path) -> tuple[Counts, int]:
    """What both count together, and what sockets sent more than before."""

    def work(rank: int) -> None:
        comm = GlooComm(rank, 2, str(folder / "meet"), timeout_s=30)
        comm.__dict__["_group"] = GlooComm.__dict__["_group"].func(comm)  # which threads would wait for in turn
        comm.join()
        comm.all_reduce(torch.ones(1), Reduction.MAX)
        comm.all_reduce(torch.ones(1000))
        comm.all_gather(torch.ones(3))
        comm.reduce_scatter(torch.ones(2, 500))
        comm.all_to_all(torch.ones(4, 10), [1, 3], [1, 1] if not rank else [3, 3])
        comm.exchange(torch.ones(7), 1 - rank, torch.empty(7), 1 - rank).wait()
        sent.append(wire_bytes())
        comm.close()

    sent: list[int] = []
    with counted() as counts, concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    return counts, max(sent)


def test_calls_are_counted_once_whatever_they_are_made_of(tmp_path: pathlib.Path) -> None:
    """A reduce-scatter of gloo's is an all-to-all, an exchange a send; a maximum is no sum, and `join` is one."""
    original = GlooComm.all_reduce
    counts, wire = on_two_ranks(tmp_path)
    assert counts.calls == {"all-reduce": 4, "all-gather": 2, "reduce-scatter": 2, "all-to-all": 2, "send": 2}
    assert counts.sent == {
        "all-reduce": 2 * (4 + 4000), "all-gather": 2 * 12, "reduce-scatter": 2 * 2000, "all-to-all": 40 * (3 + 1),
        "send": 2 * 28,
    }  # fmt: skip
    assert GlooComm.all_reduce is original
    if sys.platform == "linux":
        assert sum(counts.sent.values()) < wire < sum(counts.sent.values()) + 10_000


def test_idle_shares_of_ideal_stages_are_the_formula() -> None:
    """A step takes a second in each stage: M of them are through S stages after M + S - 1 seconds."""
    for n_stages, n_micro in ((2, 1), (2, 8), (4, 4), (8, 32)):
        seconds = n_micro + n_stages - 1.0
        assert idle(n_stages, float(n_micro * n_stages), seconds) == pytest.approx(formula(n_stages, n_micro))


def test_the_real_scheduler_leaves_the_bubbles_of_the_formula_and_hops_alone_at_steady_load() -> None:
    clocks = simulated(3, [1, 2, 6]), simulated(1, [1, 2, 6])
    *others, steady = rows_of(3, [1, 2, 6], None, None, clocks)
    for row in others:
        assert row["simulated"] == pytest.approx(row["formula"], abs=0.02) and row["idle"] is None
    assert others[-1]["load"] == "decode" and others[-1]["formula"] == pytest.approx(2 / 3)
    assert steady["formula"] == 0 and 0 <= steady["simulated"] < 0.06, "hops, and until stages are full"


def test_a_stage_that_waits_is_idle_and_one_that_computes_is_not() -> None:
    """However busy the machine is: in line for a core is not idle. A thread that wakes stands in line, too, so that the
    wait may have to be a longer one."""
    if sys.platform != "linux":
        pytest.skip("no clocks of threads")
    with StageIdle(1) as computing:
        end_s = time.perf_counter() + 0.2
        while time.perf_counter() < end_s:
            sum(range(1000))
    assert computing.shares[0] < 0.2
    assert any(share_of_sleep(0.2 * 2**i) > 0.8 for i in range(6))


def share_of_sleep(seconds: float) -> float:
    with StageIdle(1) as waiting:
        time.sleep(seconds)
    return waiting.shares[0]


def test_the_published_table_has_every_length() -> None:
    known = published()
    assert len(known) == 5 * 9 * 3 and known[20, 8, 1, 1] == 225 and known[200, 200, 256, 4] == 10447
    assert {(n_in, n_out) for n_in, n_out, _, _ in known} == set(lengths_of("20x8,60x20,128x20,80x200,200x200"))


def test_a_table_is_aligned_and_shows_what_lacks(tmp_path: pathlib.Path) -> None:
    lines = list(table([{"input": 20, "ms": 1234.56, "expected_ms": None}], COLUMNS))
    assert len({len(line) for line in lines}) == 1 and "1,235" in lines[1] and lines[1].endswith("–")


def test_records_are_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    found, clocked, whole = Measured(2), Measured(2), Measured(1)
    for name, seconds, whole_s in (
        ("batch 1", 2.0, 2.0), ("batch 2", 3.0, 4.0), ("decode 1", 1.0, 1.0), ("decode 2", 1.0, 1.0),
    ):  # fmt: skip
        found.seconds[name] = clocked.seconds[name] = [seconds, 9.0]
        whole.seconds[name] = [whole_s, 9.0]
        clocked.idle[name] = [[0.1, 0.3], [0.2, 0.4], [0.9, 0.9]]
    assert rows_of(2, [1], found, None, (found, whole))[0]["idle"] is None, "nothing to hold it against"
    rows = rows_of(2, [1, 2], found, whole, (found, whole))
    assert [row["idle"] for row in rows] == [0.5, pytest.approx(1 / 3), 0.5, 0], "by times"
    rows = rows_of(2, [1, 2], clocked, whole, (found, whole))
    assert [row["idle"] for row in rows] == [pytest.approx(0.3)] * 4, "by clocks: the median of rounds, of each stage"
    report = build_report("pipeline_bubbles", {"device": "cpu"}, {"rows": rows}, argv=["bubbles"])
    rank_plots.draw(report, str(tmp_path / "drawn.png"))
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_a_rank_alone_has_its_part(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_groups", workers._groups)
    report, layers = tmp_path / "report.json", json.dumps({"num_hidden_layers": 2})
    command = ["latency", "--model", "shape:qwen3-0.6b", "--device", "cpu", "--max-model-len", "64", "--no-view"]
    command += [
        "--batch-size",
        "1",
        "--input-len",
        "8",
        "--output-len",
        "3",
        "--num-iters",
        "1",
        "--num-iters-warmup",
        "0",
    ]
    made: list[int] = []
    original = Worker.load

    def load(worker: Worker) -> WorkerFacts:
        made.append(worker.arch.n_heads)
        return original(worker)

    monkeypatch.setattr(Worker, "load", load)
    assert rank_alone.run(4, [*command, "--hf-overrides", layers, "--output-json", str(report)]) == 0
    assert made == [4] and json.loads(report.read_text())["results"]["cases"][0]["n_decode_steps"] > 0
