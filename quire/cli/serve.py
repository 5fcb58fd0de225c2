"""`quire serve [MODEL]`: flags of the engine and of the server; the server itself is `serve/server.py`."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys

from quire.cli.interrupt import instant_exit
from quire.cli.model import add_engine_flags, engine_config
from quire.config.cluster import ClusterConfig
from quire.config.command_line import dashed
from quire.config.engine import EngineConfig
from quire.config.flags import add_flags, given_values, read_flags
from quire.core.errors import ConfigError
from quire.engine import stdio
from quire.planner.calibration import load_calibration
from quire.serve.config import ServerConfig
from quire.serve.signals import ignore_hangups_until_served


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire serve [MODEL] [options]"
    add_engine_flags(parser)
    add_flags(parser, ServerConfig, title="server options")
    add_flags(parser, ClusterConfig, title="options of replicas")


def run(namespace: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code."""
    stdio.show_stacks_on_signal()
    ignore_hangups_until_served()
    engine = engine_config(namespace)
    if _is_headless(engine, is_asked=getattr(namespace, "headless", False)):
        return _run_headless(engine, namespace)
    server = read_flags(namespace, ServerConfig)
    cluster = read_flags(namespace, ClusterConfig)
    cluster.check_used()
    if server.calibration:
        load_calibration(pathlib.Path(server.calibration))  # what is wrong with it is said before a model is loaded
    if engine.nnodes > 1 and not cluster.is_used:
        from quire.engine.ranks.node_port import check_address

        check_address(engine)
    model = engine.model or "the demo model"
    with contextlib.suppress(OSError):  # a closed or full log stops nobody
        print(f"quire: starting the server, then loading torch and {model}", file=sys.stderr, flush=True)
        if engine.load_format == "dummy":
            print(f"quire: warning: {_random_weights(engine, model)}", file=sys.stderr, flush=True)
    if cluster.is_used:
        with instant_exit():
            from quire.serve.replicas import run as run_replicas
        return run_replicas(engine, server, cluster)
    with instant_exit():
        from quire.serve.server import run as run_server
    return run_server(engine, server)


def _is_headless(engine: EngineConfig, *, is_asked: bool) -> bool:
    """Whether this process only has ranks of node 0's engine. ConfigError where its options say both."""
    if is_asked == (engine.node_rank > 0):
        return is_asked
    if is_asked:
        raise ConfigError(
            "--headless with --node-rank 0: node 0 serves, and the others hold ranks for it: leave --headless out, or"
            " give --node-rank 1 or more", param="headless",
        )  # fmt: skip
    raise ConfigError(
        f"--node-rank {engine.node_rank} without --headless: node 0 serves, and the others hold ranks for it: add"
        " --headless, or leave --node-rank out", param="headless",
    )  # fmt: skip


def _run_headless(engine: EngineConfig, namespace: argparse.Namespace) -> int:
    """The life of a node without HTTP; its exit code."""
    if read_flags(namespace, ClusterConfig).is_used:
        raise ConfigError("--headless goes without options of replicas: Ray places their nodes", param="headless")
    unused = [dashed(name) for name in given_values(namespace, ServerConfig) if name != "headless"]
    if unused:
        with contextlib.suppress(OSError):
            print(f"quire: not used by this node, for node 0 serves HTTP: {', '.join(unused)}", file=sys.stderr)
    from quire.engine.ranks.node import run_node

    return run_node(engine)


def _random_weights(engine: EngineConfig, model: str) -> str:
    text = f"the weights of {model} are random (--load-format dummy), so what it answers means nothing"
    if engine.skip_tokenizer_init:
        text += "; it has no tokenizer (--skip-tokenizer-init), so prompts must be token ids"
    return text
