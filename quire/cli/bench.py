"""`quire bench KIND`: options in; a table, JSON, a plot out. The kinds are those of `KINDS`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.bench import limit
from quire.bench.machine import hardware
from quire.bench.options import (
    CalibrateOptions,
    KernelBenchOptions,
    LatencyOptions,
    ReplayOptions,
    ReportOptions,
    ServeBenchOptions,
    SpeculateOptions,
    ThroughputOptions,
    TradeoffOptions,
)
from quire.bench.plan_check import one_line
from quire.bench.plot import check_plot_path, write_plot
from quire.bench.report import build_report, check_report_path, write_report
from quire.bench.timeline import Timeline, from_requests
from quire.bench.trace import check_trace_path
from quire.bench.workloads import WORKLOADS, LatencyCase, check_lengths, throughput_dataset
from quire.cli.model import add_engine_flags, engine_config, load_llm
from quire.cli.tradeoffs import run_tradeoffs
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.flags import add_flags, read_flags
from quire.config.model import read_arch
from quire.core.errors import ConfigError
from quire.core.files import write_output
from quire.planner.operators import Kind

if TYPE_CHECKING:
    from quire.bench.breakdown import Breakdown
    from quire.bench.serving import ServingRun
    from quire.bench.view import View

KINDS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "latency": (LatencyOptions, "Time of one batch of equal requests, in this process."),
    "throughput": (ThroughputOptions, "Tokens a second of many requests, in this process."),
    "speculate": (SpeculateOptions, "The same requests with drafts and without, in turns, in this process."),
    "tradeoffs": (TradeoffOptions, "Quality, speed and memory of the model in every scheme, in this process."),
    "serve": (ServeBenchOptions, "Latencies and throughput of a running OpenAI-compatible server."),
    "replay": (ReplayOptions, "Traffic that `quire serve --record FILE` wrote, again, with its timing."),
    "calibrate": (CalibrateOptions, "Steps of the engine on this machine, as a calibration for quire plan."),
    "kernels": (KernelBenchOptions, "Each op and implementation: error, time against its limit, and against peers."),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their flags."""
    runs: dict[str, Callable[[argparse.Namespace], int]] = {
        "latency": run_latency, "throughput": run_throughput, "serve": run_serve, "replay": run_replay,
        "kernels": run_kernels, "speculate": run_speculate, "calibrate": run_calibrate,
        "tradeoffs": run_tradeoffs,
    }  # fmt: skip
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    for name, (options, meaning) in KINDS.items():
        in_process = name in ("latency", "throughput", "speculate", "tradeoffs")
        usage = f"quire bench {name} {'[MODEL] ' if in_process else 'FILE ' if name == 'replay' else ''}[options]"
        kind = kinds.add_parser(name, help=meaning, description=meaning, usage=usage)
        kind.set_defaults(measure=runs[name])
        add_flags(kind, options, title="benchmark options")
        if name == "replay":
            kind.add_argument("record", metavar="FILE", help="The record.")
        if in_process:
            add_engine_flags(kind)


def run(namespace: argparse.Namespace) -> int:
    """Run the chosen benchmark; returns the exit code."""
    return int(namespace.measure(namespace))


def run_throughput(namespace: argparse.Namespace) -> int:
    """`quire bench throughput`."""
    options = read_flags(namespace, ThroughputOptions)
    _check_paths(options)
    config, temperature = _engine_for(namespace, options.workload), options.temperature
    if options.workload != "none":
        fixed = throughput_dataset(options.workload, options.dataset_path)
        temperature = WORKLOADS[options.workload].temperature
    view = _view(options, config)
    llm = load_llm(config)
    from quire.bench.offline import measure_throughput

    try:
        own = options.dataset(min(options.vocab_size, llm.logits_width), config.seed)
        dataset = own if options.workload == "none" else fixed
        results, timeline = measure_throughput(llm, dataset, temperature, options, view)
    finally:
        llm.shutdown()
    _print_table("Throughput", results)
    _finish_view(view, options, "quire bench throughput")
    _write(f"throughput {options.workload}", options, config, results, timeline)
    return 0


def run_latency(namespace: argparse.Namespace) -> int:
    """`quire bench latency`."""
    options = read_flags(namespace, LatencyOptions)
    _check_paths(options)
    cases: Sequence[LatencyCase] = [LatencyCase(options.batch_size, options.input_len, options.output_len)]
    if options.workload != "none":
        cases = WORKLOADS[options.workload].cases
    config = _engine_for(namespace, options.workload)
    check_lengths(cases, config.max_model_len or _arch_of(config).max_position)
    view = _view(options, config)
    llm = load_llm(config)
    from quire.bench.offline import check_batches, measure_latency

    try:
        check_lengths(cases, llm.max_model_len)  # the pool of pages may have less room than the model
        check_batches(llm, (case.batch_size for case in cases), "--batch-size")
        rows, timeline = measure_latency(llm, cases, min(options.vocab_size, llm.logits_width), options, view)
    finally:
        llm.shutdown()
    for row in rows:
        _print_table(f"Batch of {row['batch_size']}, {row['input_len']} in, {row['output_len']} out", row)
    _finish_view(view, options, "quire bench latency")
    results = {"cases": rows} if view is None else {"cases": rows, "ceilings": view.ceilings()}
    _write(f"latency {options.workload}", options, config, results, timeline)
    return 0


def run_speculate(namespace: argparse.Namespace) -> int:
    """`quire bench speculate`; exit code 1 if a token was another one with drafts, where a device promises the same."""
    options = read_flags(namespace, SpeculateOptions)
    _check_paths(options)
    config = _engine_for(namespace, "none")
    from quire.bench.draft_chart import panels, write_draft_chart
    from quire.bench.draft_reason import why_no_gain
    from quire.bench.speculate import measure_speculation

    rows, costs = measure_speculation(config, options)
    for n, row in zip(options.batch_sizes, rows, strict=True):
        _print_table(f"Batch of {n}", row)
        n_tokens = n * (options.output_len - 1) * options.num_iters
        row["why_no_gain"] = why_no_gain(row, costs, n_tokens)
        if row["why_no_gain"]:
            print(row["why_no_gain"])
    if options.output_json:
        settings = msgspec.structs.asdict(options) | msgspec.structs.asdict(config)
        results = {"cases": rows, "costs": None if costs is None else dataclasses.asdict(costs)}
        write_report(options.output_json, build_report("speculate", settings, results))
    if options.plot:
        write_draft_chart(options.plot, panels(rows, costs), "quire bench speculate")
    return 1 if any(row["same_tokens"] is False for row in rows) else 0


def run_serve(namespace: argparse.Namespace) -> int:
    """`quire bench serve`; exit code 1 if a request failed."""
    options = read_flags(namespace, ServeBenchOptions)
    _check_paths(options)
    import uvloop

    from quire.bench.serving import measure_serving, parse_goodput, serving_metrics

    goodput = parse_goodput(options.goodput)
    run = uvloop.run(measure_serving(options))
    results = serving_metrics(run.traces, run.duration_s, options.metric_percentiles, goodput)
    return _finish_load("serve", f"Serving {run.model}", options, run, results)


def run_replay(namespace: argparse.Namespace) -> int:
    """`quire bench replay FILE`; exit code 1 if a request failed."""
    options = read_flags(namespace, ReplayOptions)
    _check_paths(options)
    import uvloop

    from quire.bench.replay import replay
    from quire.bench.serving import serving_metrics

    run = uvloop.run(replay(namespace.record, options))
    results = serving_metrics(run.traces, run.duration_s)
    return _finish_load("replay", f"Replay to {run.model}", options, run, results)


def _finish_load(name: str, title: str, options: ReportOptions, run: ServingRun, results: dict[str, object]) -> int:
    """Model against measurement comes from the server, which knows its device and its steps."""
    _print_table(title, results)
    if run.explained.line:
        print(run.explained.line)
    _write(name, options, None, results | {"expected": msgspec.to_builtins(run.explained)}, from_requests(run.traces))
    return 1 if results["failed"] else 0


def run_kernels(namespace: argparse.Namespace) -> int:
    """`quire bench kernels`; exit code 1 if an implementation failed or is wrong."""
    options = read_flags(namespace, KernelBenchOptions)
    from quire.bench.kernels import chart, table
    from quire.bench.kernels.session import measure

    if options.plot:
        chart.check_chart_path(options.plot)
    if options.output:
        check_report_path(options.output, "--output")
    results, device = measure(options)
    for line in table.lines(results):
        print(line)
    if options.output:
        settings = msgspec.structs.asdict(options) | {"device_name": device}
        write_report(options.output, build_report("kernels", settings, table.values(results)))
    if options.plot:
        chart.write_chart(options.plot, results.timings, f"quire bench kernels, {options.dtype}, {device}")
    return 1 if results.failed else 0


def run_calibrate(namespace: argparse.Namespace) -> int:
    """`quire bench calibrate`."""
    options = read_flags(namespace, CalibrateOptions)
    check_report_path(options.output, "--output")
    from quire.bench.calibrate import calibrate, lines
    from quire.engine.build import device_of

    began_s, device = time.perf_counter(), device_of(EngineConfig(device=options.device))
    found, samples = calibrate(device, options.rounds, print, options.time_limit)
    print("\n".join(lines(found, samples)))
    print(found.source)
    write_output(options.output, msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")
    print(f"written: {options.output}; quire plan MODEL --gpu here --calibration {options.output}")
    took_s = time.perf_counter() - began_s
    if options.time_limit and took_s > options.time_limit:
        print(
            f"it took {took_s:.0f} s, more than --time-limit {options.time_limit:g}: turns that have begun are ended,"
            " and each step is timed once"
        )
    return 0


def _engine_for(namespace: argparse.Namespace, workload: str) -> EngineConfig:
    """Engine options as given; a workload stands in for the model and context length that were not."""
    fixed: dict[str, object] = {"disable_log_stats": True}
    if workload != "none":
        fixed |= {"model": WORKLOADS[workload].model, "max_model_len": WORKLOADS[workload].max_model_len}
    return engine_config(namespace, **fixed)


def _view(options: ThroughputOptions | LatencyOptions, config: EngineConfig) -> View | None:
    """Probes the device; None where there is nothing to see. ConfigError for a profile of the null device."""
    if config.device == "null" and options.profile:
        raise ConfigError("--profile shows a device at work, and the null device does none: use --device cpu or cuda")
    if not options.view or config.device == "null":
        return None
    from quire.bench.view import View

    return View(config, _arch_of(config))


def _arch_of(config: EngineConfig) -> ModelArch:
    from quire.compute.weights.hub import find_checkpoint

    return read_arch(find_checkpoint(config.model, config.revision, config.download_dir), config.hf_overrides)


def _finish_view(view: View | None, options: ThroughputOptions | LatencyOptions, title: str) -> None:
    if view is not None:
        print(view.line())
        if options.profile:
            view.write_trace(options.profile, title)


def _check_paths(options: ReportOptions) -> None:
    if isinstance(options, ThroughputOptions | LatencyOptions) and options.profile:
        check_trace_path(options.profile)
        if not options.view:
            raise ConfigError("--profile writes what the view has profiled: leave out --no-view")
    if options.plot:
        check_plot_path(options.plot)
    if options.output_json:
        check_report_path(options.output_json)


def _write(
    name: str,
    options: ReportOptions,
    config: EngineConfig | None,
    results: Mapping[str, object],
    timeline: Timeline,
) -> None:
    name = name.removesuffix(" none")
    engine = {} if config is None else msgspec.structs.asdict(config)
    if options.output_json:
        settings = msgspec.structs.asdict(options) | engine
        write_report(options.output_json, build_report(name, settings, results, timeline))
    if config is not None and config.device != "null":
        _say_expected(name, msgspec.structs.asdict(options) | engine, results, _arch_of(config))
    if options.plot:
        write_plot(options.plot, timeline, f"quire bench {name}")


def _say_expected(name: str, settings: Mapping[str, object], results: Mapping[str, object], arch: ModelArch) -> None:
    """The planner's expectation beside the measurement, where it has a calibration of this machine."""
    text = one_line({"benchmark": name, "config": settings, "results": results, "hardware": hardware()}, arch)
    if text:
        print(text)


def _print_table(title: str, figures: Mapping[str, object]) -> None:
    """One figure a line, then limits and breakdown; lists and what was not measured are left to the report."""
    print(f"{title:=^60}")
    for name, value in figures.items():
        if isinstance(value, float) and math.isfinite(value):
            print(f"{name:<36}{value:>24,.2f}")
        elif isinstance(value, int):
            print(f"{name:<36}{value:>24,}")
        elif isinstance(value, list) and value and isinstance(value[0], str):
            for text in value:
                print(f"{name}: {text}")
    if "limits" in figures:
        parts: Breakdown = figures["breakdown"]  # type: ignore[assignment]
        limits = limit.lines(figures["limits"], has_experts=limit.PARTS[Kind.EXPERTS] in parts.limits_ms)  # type: ignore[arg-type]
        print("\n".join(limits + parts.lines()))
