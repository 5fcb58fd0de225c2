"""`quire simulate [MODEL]`: the engine as it is, over machines that are not here; tables, JSON, plots out. No torch."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping

import msgspec

from quire.bench.report import build_report, check_report_path, write_report
from quire.bench.simulate.figures import figures, parse_slo
from quire.bench.simulate.fleet import Fleet
from quire.bench.simulate.options import SimulateOptions, is_known_at_once, settings
from quire.bench.simulate.replica import EngineReplica
from quire.bench.simulate.router import router_named
from quire.bench.workloads import WORKLOADS
from quire.cli.model import add_engine_flags, engine_config
from quire.compute.weights.hub import find_checkpoint
from quire.config.engine import EngineConfig
from quire.config.flags import add_flags, read_flags
from quire.config.model import read_arch
from quire.engine.simulated import SimulatedMachine


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire simulate [MODEL] [options]"
    add_flags(parser, SimulateOptions, title="simulation options")
    add_engine_flags(parser)


def run(namespace: argparse.Namespace) -> int:
    """Simulate and say what came of it; returns the exit code."""
    options = read_flags(namespace, SimulateOptions)
    if options.output_json:
        check_report_path(options.output_json)
    slo = parse_slo(options.slo)
    config = _config(namespace, options)
    requests, notes = options.requests(config.seed)
    for note in notes:
        print(f"quire simulate: {note}", file=sys.stderr)
    machine = _machine(config, options, is_server=not is_known_at_once(requests, options.request_rate))
    found = []
    rates: list[float | None] = [*options.request_rate] or [None]
    for rate in rates:
        timed = options.timed(requests, rate, config.seed)
        router = router_named(options.router, options.replicas, config.block_size, machine.n_pages)
        simulated = Fleet([EngineReplica(machine) for _ in range(options.replicas)], router).run(timed)
        found.append(figures(simulated, slo))
        _print_table("Simulation", found[-1])
    if options.output_json:
        values = settings(options) | msgspec.structs.asdict(config)
        write_report(options.output_json, build_report("simulate", values, {"runs": found}))
    return 0


def _config(namespace: argparse.Namespace, options: SimulateOptions) -> EngineConfig:
    fixed: dict[str, object] = {"model": "shape:llama-3.1-8b"}
    if options.workload in WORKLOADS:
        workload = WORKLOADS[options.workload]
        fixed = {"model": workload.model, "max_model_len": workload.max_model_len}
    return engine_config(namespace, **fixed)


def _machine(config: EngineConfig, options: SimulateOptions, *, is_server: bool) -> SimulatedMachine:
    arch = read_arch(find_checkpoint(config.model, config.revision, config.download_dir), config.hf_overrides)
    return SimulatedMachine.of(config, arch, options.gpu, options.memory_bytes, is_server=is_server)


def _print_table(title: str, values: Mapping[str, float | int | None]) -> None:
    print(f"{title:=^60}")
    for name, value in values.items():
        if isinstance(value, float) and math.isfinite(value):
            print(f"{name:<36}{value:>24,.4g}" if abs(value) < 100 else f"{name:<36}{value:>24,.1f}")
        elif isinstance(value, int):
            print(f"{name:<36}{value:>24,}")
