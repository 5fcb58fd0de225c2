"""`quire simulate` against runs on one H200 that were recorded before: throughput, steps, first and later tokens.

    python -m benchmarks.simulated_against_measured --lengths w3_lengths.json

Nothing is fitted here: the costs are those of `planner/cost`. Prints a table, and writes the same as JSON. The recorded
runs are benchmarks/results/h200/w1.json, w2, w3, w5 (all at once), w6 (batches) and online.json (rates, over HTTP).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.bench.datasets import read_lengths
from quire.bench.report import build_report, write_report
from quire.bench.shape import shape_options
from quire.bench.simulate.figures import figures
from quire.bench.simulate.fleet import Fleet
from quire.bench.simulate.record import Run
from quire.bench.simulate.replica import EngineReplica
from quire.bench.simulate.requests import SimRequest, at_rate, of_lengths, workload_requests
from quire.bench.simulate.router import RoundRobin
from quire.bench.timeline import Timeline
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.engine.simulated import SimulatedMachine
from quire.planner.accelerators import accelerator_named

RESULTS = pathlib.Path(__file__).with_name("results")
Row = dict[str, Any]


def simulate(
    config: dict[str, Any],
    requests: Sequence[SimRequest],
    gpu: str,
    *,
    is_server: bool = False,
    waiting_weight: float | None = None,
) -> tuple[Run, Timeline]:
    """The run of an engine with a recorded configuration, and its steps. waiting_weight: of `Pace`, if not today's."""
    known = {name: value for name, value in config.items() if name in EngineConfig.__struct_fields__}
    engine = msgspec.convert(known | {"model": config["model"]}, EngineConfig)
    arch = read_arch(pathlib.Path(engine.model), engine.hf_overrides)
    machine = SimulatedMachine.of(engine, arch, gpu, int(accelerator_named(gpu).memory_bytes), is_server=is_server)
    if waiting_weight is not None and machine.pace is not None:
        machine = dataclasses.replace(machine, pace=dataclasses.replace(machine.pace, waiting_weight=waiting_weight))
    run = Fleet([EngineReplica(machine)], RoundRobin(1)).run(requests)
    return run, run.logs[0].timeline


def recorded(name: str) -> Row:
    """A report of the H200, its model where it is here."""
    report: Row = json.loads((RESULTS / "h200" / f"{name}.json").read_text())
    model = str(report["config"].get("model", "")).rpartition("/")[2].removeprefix("shape:")
    report["config"] |= shape_options(f"shape:{model}")
    return report


def decode_ms(timeline: Any, n_running: int) -> float:
    """Median time between two steps of decodes alone with about so many sequences; NaN if there were none."""
    least = 0.9 * n_running
    rows = list(zip(timeline["time_s"], timeline["n_running"], timeline["n_prefill_tokens"], strict=True))
    gaps = [
        1000 * (after[0] - before[0])
        for before, after in itertools.pairwise(rows)
        if not before[2] and not after[2] and after[1] >= least
    ]
    return statistics.median(gaps) if gaps else math.nan


def row(case: str, figure: str, measured: float, simulated: float) -> Row:
    return {
        "case": case, "figure": figure, "measured": measured, "simulated": simulated,
        "error": simulated / measured - 1 if measured else math.nan,
    }  # fmt: skip


def throughput_rows(lengths: str, gpu: str) -> Iterator[Row]:
    """W1, W2, W3, W5: tokens a second, steps, and a decode step of the full batch."""
    for name in ("W1", "W2", "W3", "W5"):
        report = recorded(name.lower())
        results, line = report["results"], report["timeline"]
        run, timeline = simulate(report["config"], workload_requests(name, lengths), gpu)
        found, n = figures(run), max(line["n_running"])
        rate = results["output_tokens_per_second"]
        yield row(name, "output tok/s", rate, float(found["output_throughput"] or 0))
        yield row(name, "steps", len(line["time_s"]), len(timeline))
        yield row(name, "steps as recorded, rows and sequences", len(line["time_s"]), n_alike(line, timeline.columns()))
        yield row(name, "decode step of a full batch, ms", decode_ms(line, n), decode_ms(timeline.columns(), n))
        yield row(name, "until nobody waits, s", *(_drained_s(one) for one in (line, timeline.columns())))


def n_alike(line: Any, other: Any) -> int:
    """Steps with the same number of rows, prompt tokens, sequences that run and that wait."""
    columns = ("n_tokens", "n_prefill_tokens", "n_running", "n_waiting")
    pairs = zip(*(zip(*(one[name] for name in columns), strict=True) for one in (line, other)), strict=False)
    return sum(a == b for a, b in pairs)


def _drained_s(timeline: Any) -> float:
    """When the queue is empty, after the first step: prompts are most of what was computed."""
    pairs = zip(timeline["time_s"], timeline["n_waiting"], strict=True)
    return next(time_s for time_s, n in pairs if not n) - timeline["time_s"][0]


def latency_rows(gpu: str) -> Iterator[Row]:
    """W6: a decode step, and the mean first token, of batches."""
    report = recorded("w6")
    for case in report["results"]["cases"]:
        n, n_in, n_out = case["batch_size"], case["input_len"], case["output_len"]
        run, timeline = simulate(report["config"], of_lengths([(n_in, n_out)] * n), gpu)
        yield row(f"W6, {n}", "decode step, ms", case["decode_step_ms"], decode_ms(timeline.columns(), n))
        yield row(f"W6, {n}", "mean TTFT, ms", case["mean_ttft_ms"], float(figures(run)["mean_ttft_ms"] or 0))


def online_rows(lengths: str, gpu: str) -> Iterator[Row]:
    """The server at four rates: its answers go over HTTP, which is not simulated, and its streams bore as much whoever
    waited (docs/decisions/0006)."""
    report = recorded("online")
    config = report["config"] | {"max_model_len": 20480}
    assert report["config"]["serve_options"] == ["--max-model-len", "20480"]
    drawn = read_lengths(lengths)
    for measured in report["results"]["rates"]:
        rate, n = measured["request_rate"], measured["n_requests"]
        requests = at_rate(of_lengths([drawn[i % len(drawn)] for i in range(n)]), rate, 1.0, report["config"]["seed"])
        found = figures(simulate(config, requests, gpu, is_server=True, waiting_weight=0.0)[0])
        for name in ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p99_itl_ms"):
            yield row(f"{rate:g} requests/s", name.replace("_", " "), measured[name], float(found[name] or 0))


def speeds(lengths: str, gpu: str) -> list[Row]:
    """Simulated requests a second of processor time, the best of three: W3's requests at once, and at two rates."""
    config, requests = recorded("w3")["config"], workload_requests("W3", lengths)
    found = []
    for rate in (math.inf, 60.0, 20.0):
        timed = at_rate(requests, rate, 1.0, 0)
        runs = [simulate(config, timed, gpu, is_server=rate < math.inf) for _ in range(3)]
        cpu_s = min(run.cpu_s for run, _ in runs)
        found.append({
            "rate": rate, "requests_per_cpu_s": len(timed) / cpu_s, "steps": runs[0][0].logs[0].n_steps,
            "us_a_step": 1e6 * cpu_s / runs[0][0].logs[0].n_steps,
        })  # fmt: skip
        print(f"W3 at {rate:g} requests/s: {len(timed) / cpu_s:,.0f} simulated requests a second of processor time")
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated_against_measured", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--lengths", required=True, help="JSON file with lists 'input' and 'output' (W3)")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--output", default=str(RESULTS / "simulated_against_measured.json"))
    args = parser.parse_args(argv)
    rows = []
    print(f"{'':<18}{'':<34}{'measured':>12}{'simulated':>12}{'error':>9}")
    for parts in (throughput_rows(args.lengths, args.gpu), latency_rows(args.gpu), online_rows(args.lengths, args.gpu)):
        for one in parts:
            rows.append(one)
            print(
                f"{one['case']:<18}{one['figure']:<34}{one['measured']:>12,.4g}{one['simulated']:>12,.4g}"
                f"{100 * one['error']:>8.1f}%", flush=True,
            )  # fmt: skip
    errors = sorted(abs(one["error"]) for one in rows if math.isfinite(one["error"]))
    results = {"rows": rows, "median_error": statistics.median(errors), "worst_error": errors[-1]}
    results["speed"] = speeds(args.lengths, args.gpu)
    print(f"median of the errors {100 * results['median_error']:.1f} %, the worst {100 * errors[-1]:.1f} %")
    report = build_report("simulated against measured", vars(args), results, argv=[parser.prog, *argv])
    write_report(args.output, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
