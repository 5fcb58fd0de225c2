"""`quire simulate [MODEL]`: the engine as it is, over machines that are not here; tables, JSON, plots out. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

import msgspec

from quire.bench.plot import check_plot_path, write_plot
from quire.bench.report import build_report, check_report_path, write_report
from quire.bench.simulate import charts, subject, tables
from quire.bench.simulate.figures import Slo, parse_slo
from quire.bench.simulate.options import ABOUT_REQUESTS, SimulateOptions, is_known_at_once
from quire.bench.simulate.requests import SimRequest
from quire.bench.simulate.session import (
    PICTURED,
    Figures,
    Point,
    Variant,
    baseline_rates,
    baselines,
    capacity,
    check_lengths,
    points,
)
from quire.bench.workloads import WORKLOADS
from quire.cli.model import add_engine_flags, simulated_config
from quire.compute.weights.hub import find_checkpoint
from quire.config.command_line import dashed
from quire.config.engine import EngineConfig
from quire.config.flags import FlagParser, add_flags, given_values, read_flags
from quire.config.model import read_arch
from quire.core.errors import ConfigError, shown
from quire.engine.simulated import SimulatedMachine

DEFAULT_MODEL = "shape:llama-3.1-8b"
UNCHANGED = {
    "compare", "baselines", "capacity", "output_json", "plot", "trace", "workload", "request_rate", "slo", "slo_share",
    "baseline_batch", "baseline_delay_ms", *ABOUT_REQUESTS,
}  # fmt: skip
"""Options that say what is compared, not how it is served."""
SHARED = "the same for all that is compared: give it beside --compare"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire simulate [MODEL] [options]"
    add_flags(parser, SimulateOptions, title="simulation options")
    add_engine_flags(parser, default=DEFAULT_MODEL)


def run(namespace: argparse.Namespace) -> int:
    """Simulate and say what came of it; returns the exit code: 1 if nothing was completed, and nothing to be seen, or
    if no rate keeps the limits of --capacity."""
    options = read_flags(namespace, SimulateOptions)
    slo = parse_slo(options.slo)
    _check(options, slo)
    options.check_read(given_values(namespace, SimulateOptions))
    config = _config(namespace, options)
    requests, notes = options.requests(config.seed)
    for note in notes:
        print(f"quire simulate: {note}", file=sys.stderr)
    at_once = is_known_at_once(requests, options.request_rate) and not (options.capacity or options.baselines)
    variants = [_variant("as given", config, options, at_once)]
    for text in options.compare:
        variants.append(_variant(text, *_changed(namespace, text), at_once))
    check_lengths(variants, requests)
    _say(subject.lines(variants, requests))
    found: list[Point] = []
    is_no = False
    results: dict[str, object] = {"simulated": {one.name: subject.subject(one, requests) for one in variants}}
    if options.capacity and slo is not None:
        results["capacity"] = rates = _capacities(variants, requests, slo, options.slo_share)
        is_no = not any(one["capacity"] for one in rates.values())
    elif options.baselines:
        found = _baselines(variants[0], requests, slo)
        results["baselines"] = _rows(found)
    else:
        found = _runs(variants, requests, slo)
        results["runs"] = _rows(found)
    if options.output_json:
        settings = msgspec.structs.asdict(options) | msgspec.structs.asdict(config)
        settings["n_pages"] = variants[0].machine.n_pages
        write_report(options.output_json, build_report("simulate", settings, results))
    for line in tables.refusals(found):
        print(f"quire simulate: {line}", file=sys.stderr)
    is_no |= bool(found) and not any(point.figures["completed"] for point in found)
    return 1 if is_no else 0


def _check(options: SimulateOptions, slo: Slo | None) -> None:
    """ConfigError for what cannot be done, before anything is simulated."""
    if options.capacity and slo is None:
        raise ConfigError("--capacity is the rate at which an --slo is kept: give one, such as ttft=200ms,tpot=20ms")
    if options.capacity and options.request_rate:
        raise ConfigError("--capacity looks for the rate, and --request-rate gives one: leave one of them out")
    if options.baselines and (options.capacity or options.compare):
        raise ConfigError("--baselines is a comparison of its own: leave --capacity and --compare out")
    if options.output_json:
        check_report_path(options.output_json)
    if options.plot and options.baselines:
        charts.check_folder(options.plot)
    elif options.plot:
        check_plot_path(options.plot)
        is_timeline = len(options.request_rate) < 2 and not options.compare
        if not is_timeline and not options.plot.endswith(".png"):
            raise ConfigError("--plot of several rates or variants is drawn as .png: give such a name")


def _config(namespace: argparse.Namespace, options: SimulateOptions, **changes: object) -> EngineConfig:
    fixed: dict[str, object] = {"model": DEFAULT_MODEL}
    if options.workload in WORKLOADS:
        workload = WORKLOADS[options.workload]
        fixed = {"model": workload.model, "max_model_len": workload.max_model_len}
    return msgspec.structs.replace(simulated_config(namespace, **fixed), **changes)


def _variant(name: str, config: EngineConfig, options: SimulateOptions, at_once: bool) -> Variant:
    arch = read_arch(find_checkpoint(config.model, config.revision, config.download_dir), config.hf_overrides)
    machine = SimulatedMachine.of(
        config, arch, options.gpu, options.memory_bytes, is_server=not at_once, expert_loads=options.expert_loads,
        calibration=options.times,
    )  # fmt: skip
    return Variant(name, options, machine)


def _changed(namespace: argparse.Namespace, text: str) -> tuple[EngineConfig, SimulateOptions]:
    """Both kinds of options with some flags given otherwise: `flag=value,no-switch`."""
    parser = FlagParser(prog="quire simulate", add_help=False)
    parser.where = f"--compare {shown(text)}: "
    parser.elsewhere = dict.fromkeys(map(dashed, UNCHANGED), SHARED)
    add_flags(parser, SimulateOptions, title="simulation options", skip=UNCHANGED)
    add_flags(parser, EngineConfig, title="engine options")
    given = parser.parse_args([f"--{word.removeprefix('--')}" for word in _flags(text)])
    options = read_flags(namespace, SimulateOptions, **given_values(given, SimulateOptions))
    both = argparse.Namespace(**(vars(namespace) | given_values(given, EngineConfig)))
    return _config(both, options), options


def _flags(text: str) -> list[str]:
    """What stands between commas, but those within JSON objects."""
    found, depth = [""], 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    flags = [flag.strip() for flag in found]
    if depth or not all(flags):
        wrong = "braces are not closed" if depth else "a flag is empty"
        raise ConfigError(
            f"--compare {shown(text)}: {wrong}: write flag=value,no-switch, and a JSON object whole, as"
            ' eplb-config={"num_redundant_experts":16}'
        )
    return flags


def _runs(variants: Sequence[Variant], requests: list[SimRequest], slo: Slo | None) -> list[Point]:
    options = variants[0].options
    rates: list[float | None] = [*options.request_rate] or [None]
    found = points(variants, requests, rates, slo)
    if len(rates) > 1:
        _say(tables.curve(found))
        if options.plot:
            charts.write_curves(options.plot, found)
    elif len(variants) > 1:
        _say(tables.side_by_side({point.variant: point.figures for point in found}))
        if options.plot:
            charts.write_distributions(options.plot, found)
    else:
        _say(tables.one("Simulation", found[0].figures))
        if options.plot:
            write_plot(options.plot, found[0].run.logs[0].timeline, "quire simulate")
    _say_speed(found)
    return found


def _capacities(variants: Sequence[Variant], requests: list[SimRequest], slo: Slo, share: float) -> dict[str, Figures]:
    found = {variant.name: capacity(variant, requests, slo, share) for variant in variants}
    _say(tables.side_by_side(found) if len(found) > 1 else tables.one("Capacity", found[variants[0].name]))
    return found


def _baselines(variant: Variant, requests: list[SimRequest], slo: Slo | None) -> list[Point]:
    rates = variant.options.request_rate or baseline_rates(variant, requests)
    found = points(baselines(variant), requests, rates, slo)
    _say(tables.curve(found))
    if variant.options.plot:
        charts.write_baselines(variant.options.plot, found, rates[min(PICTURED, len(rates) - 1)])
    _say_speed(found)
    return found


def _rows(found: Sequence[Point]) -> list[dict[str, object]]:
    return [
        {"variant": point.variant, "rate": point.rate, "cpu_s": point.run.cpu_s, **point.figures,
         "refusals": {code: len(reasons) for code, reasons in point.refusals.items()}}
        for point in found
    ]  # fmt: skip


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _say_speed(found: Sequence[Point]) -> None:
    n, cpu_s = sum(len(point.run.outcomes) for point in found), sum(point.run.cpu_s for point in found)
    print(f"simulated {n:,} requests in {cpu_s:.2f} s of processor time: {n / max(cpu_s, 1e-9):,.0f} a second")
