"""`quire bench tradeoffs [MODEL]`: the model in every variant; a table, JSON, a plot of quality against speed.

Owns the command's words and the folders, which are made for it and go with it. Does not own what is measured
(`bench/tradeoffs`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import pathlib
import tempfile

import msgspec

from quire.bench.options import TradeoffOptions
from quire.bench.plot import check_plot_path
from quire.bench.report import build_report, check_report_path, write_report
from quire.cli.model import engine_config
from quire.cli.quantize import make, read_tokens
from quire.compute.weights.hub import find_checkpoint
from quire.config.engine import EngineConfig
from quire.config.flags import read_flags
from quire.config.model import read_arch
from quire.config.options import make_options
from quire.config.quantize import QuantizeOptions
from quire.config.shapes import check_has_weights
from quire.core.errors import ConfigError
from quire.core.ticker import ticking


def run_tradeoffs(namespace: argparse.Namespace) -> int:
    """Measure and print; returns 0. ConfigError for wrong options and texts."""
    options = read_flags(namespace, TradeoffOptions)
    if options.plot:
        check_plot_path(options.plot)
    if options.output_json:
        check_report_path(options.output_json)
    if not options.calibrate:
        raise ConfigError("--calibrate FILE is needed: a text like what the model will read, from some 100 KB on")
    config = engine_config(namespace, disable_log_stats=True)
    if config.skip_tokenizer_init:
        raise ConfigError("quality is told on texts, which need a tokenizer: name a checkpoint that has one")
    check_has_weights(config.model, "compare")
    from quire.bench.tasks import read_tasks
    from quire.bench.tradeoff_chart import write_tradeoff_chart
    from quire.bench.tradeoffs import lines, measure, read_texts

    texts, skipped, rows = read_texts(options.texts), dict[str, str](), []
    tasks = read_tasks(options.tasks) if options.tasks else []
    _check(options, config)
    with tempfile.TemporaryDirectory(prefix="quire-tradeoffs-") as place:

        def folder(scheme: str, method: str) -> str:
            target = pathlib.Path(place) / f"{scheme.replace(':', '-')}-{method}"
            own = _quantize_options(options, scheme=scheme, method=method, device=config.device)
            with ticking(f"making {scheme} by {method}"), contextlib.redirect_stdout(io.StringIO()):
                make(own, config.model or "demo", target)
            return str(target)

        for row in measure(config, options, texts, tasks, folder, skipped):
            rows.append(row)
            right = f", {row.accuracy:.1%} of tasks" if tasks else ""
            print(f"{row.name}: {row.mean_bits:.4f} bits per byte{right}", flush=True)
    print("\n".join(["", *lines(rows)]))
    for name, reason in skipped.items():
        print(f"left out: {name}: {reason}")
    if options.output_json:
        settings = msgspec.structs.asdict(options) | msgspec.structs.asdict(config)
        results = {"variants": [dataclasses.asdict(row) for row in rows], "left_out": skipped}
        write_report(options.output_json, build_report("tradeoffs", settings, results))
    if options.plot:
        write_tradeoff_chart(options.plot, rows, f"quire bench tradeoffs, {config.model or 'demo'}")
    return 0


def _quantize_options(options: TradeoffOptions, **more: str) -> QuantizeOptions:
    own = {"calibrate": options.calibrate, "samples": options.samples, "sample_tokens": options.sample_tokens}
    return make_options(QuantizeOptions, own | more)


def _check(options: TradeoffOptions, config: EngineConfig) -> None:
    """ConfigError for what would only come up once the model as it is has been measured, and for lengths that its
    context does not hold."""
    folder = find_checkpoint(config.model, config.revision, config.download_dir)
    arch = read_arch(folder, config.hf_overrides)
    from quire.bench.tradeoffs import PROMPT_TOKENS

    most = config.max_model_len or arch.max_position
    for flag, n, least in (("--window", options.window, 1), ("--output-len", options.output_len, PROMPT_TOKENS)):
        if n + least > most:
            raise ConfigError(f"{flag} {n:,} is more than the {most - least:,} that the context has room for: lower it")
    if folder.is_dir():
        read_tokens(_quantize_options(options), folder, arch)
