"""`quire run-batch -i FILE -o FILE [MODEL]`: answers a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import argparse
import sys

from quire.cli.interrupt import instant_exit
from quire.cli.model import add_engine_flags, engine_config
from quire.config.cluster import ClusterConfig
from quire.config.flags import add_flags, named, read_flags
from quire.core.units import counted
from quire.engine import stdio

CONCURRENCY = 256


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire run-batch -i FILE -o FILE [MODEL] [options]"
    parser.add_argument(
        "-i", "--input-file", type=named, required=True, metavar="FILE",
        help='JSON lines: {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}',
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output-file", type=named, required=True, metavar="FILE", help="where the answers go, as JSON lines"
    )
    parser.add_argument(
        "--concurrency", type=_at_least_one, default=CONCURRENCY, metavar="N",
        help=f"most requests that are given to an engine at once (default {CONCURRENCY})",
    )  # fmt: skip
    add_engine_flags(parser)
    add_flags(parser, ClusterConfig, title="options of replicas", skip=("autoscaling_config",))


def run(namespace: argparse.Namespace) -> int:
    """Answer the file; returns the exit code, as vLLM's 0 also if lines fail. They are told in the output; stderr has
    their number and the first reason."""
    stdio.take_over()
    engine = engine_config(namespace, disable_log_stats=True)
    cluster = read_flags(namespace, ClusterConfig)
    cluster.check_used()
    files = namespace.input_file, namespace.output_file
    if cluster.is_used:
        with instant_exit():
            from quire.serve.batch.spread import spread_batch
        summary = spread_batch(engine, cluster, *files, namespace.concurrency)
    else:
        with instant_exit():
            from quire.serve.batch.offline import run_batch
        summary = run_batch(engine, *files, namespace.concurrency)
    print(f"{counted(summary.n_answered, 'line')} answered, {summary.n_failed:,} failed", file=sys.stderr)
    if summary.n_failed:
        print(f"the first that failed: {summary.first_reason}", file=sys.stderr)
        print(f"all answers and reasons are in {namespace.output_file}", file=sys.stderr)
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)
