"""`quire cluster FILE.yaml`: `quire serve` of what a file describes, over replicas; SIGHUP reads the file again."""

from __future__ import annotations

import argparse

from quire.cli import serve
from quire.cli.interrupt import instant_exit
from quire.cli.model import engine_config
from quire.config.cluster import ClusterConfig
from quire.config.engine import EngineConfig
from quire.config.flags import FlagParser, read_flags
from quire.core.errors import ConfigError
from quire.engine import stdio
from quire.serve.config import ServerConfig
from quire.serve.signals import ignore_hangups_until_served


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire cluster FILE.yaml"
    parser.add_argument(
        "file", metavar="FILE.yaml",
        help="options of `quire serve` as a YAML mapping, with `replicas: 4` or an autoscaling_config",
    )  # fmt: skip


def run(namespace: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code."""
    stdio.show_stacks_on_signal()
    ignore_hangups_until_served()
    engine, server, cluster = read_file(namespace.file)
    with instant_exit():
        from quire.serve.replicas import run as run_replicas

    def reread() -> tuple[EngineConfig, ClusterConfig]:
        engine, _, cluster = read_file(namespace.file)
        return engine, cluster

    return run_replicas(engine, server, cluster, reread)


def read_file(file: str) -> tuple[EngineConfig, ServerConfig, ClusterConfig]:
    """The options that a file has. Raises ConfigError; what is wrong is said as `quire serve --config` says it."""
    parser = _FileParser(prog=file)
    serve.configure(parser)
    namespace = parser.parse_args(["--config", file])
    options = engine_config(namespace), read_flags(namespace, ServerConfig), read_flags(namespace, ClusterConfig)
    for each in options:
        each.verify()
    return options


class _FileParser(FlagParser):
    """A parser whose errors are exceptions: a server that runs must not end at one in its file."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise ConfigError."""
        message = self.placed(message)
        raise ConfigError(message if self.prog in message else f"{self.prog}: {message}")
