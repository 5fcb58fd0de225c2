"""Finds the subcommand, runs it, and turns errors into a message and an exit code.

Exit codes: 0 done, 1 failed while running, 2 wrong command line, configuration or checkpoint (130: Ctrl-C, see `main`).
Invariants: only the module of the subcommand that was asked for is imported, so `quire --help` needs no torch; what was
printed has reached its file when the command ends, or the exit code says that it has not.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import os
import sys

from quire import __version__
from quire.config.flags import FlagParser, in_flags
from quire.core.errors import ConfigError, InvalidParameter, LoadError, QuireError, complaint, shown
from quire.core.shortage import shortage
from quire.core.spelling import did_you_mean
from quire.engine import logs

COMMANDS = {
    "serve": "Serve a model over HTTP, with the OpenAI API and a web page to talk to it.",
    "cluster": "Serve what a file describes, with replicas of the model on the nodes of a Ray cluster.",
    "chat": "Talk to a model in this terminal.",
    "generate": "Complete a prompt and print the text.",
    "run-batch": "Answer a file of requests in OpenAI's batch format, without a server.",
    "bench": "Measure latency, throughput, a running server, or the kernels.",
    "plan": "Say what a model takes and does on given hardware, from its description alone.",
    "simulate": "Simulate the engine under a load, on machines that are not here.",
    "quantize": "Write a checkpoint with rounded weights, calibrated with a text.",
    "merge": "Write a checkpoint that an adapter is merged into: LoRA, rsLoRA or DoRA.",
    "kernels": "List the kernels, or explain which one runs and why.",
    "doctor": "Say what this machine has and what is wrong with it.",
    "completion": "Print a script by which bash, zsh or fish completes commands and flags.",
}
"""Subcommand → help line. Its module, `quire.cli.<name>` with _ for -, has `configure(parser)` and
`run(namespace) -> int`."""

SERVING = ("serve", "cluster")
"""They set up a log of their own."""


def run(arguments: list[str]) -> int:
    """Run `quire` with these arguments; returns the exit code."""
    atexit.register(gc.freeze)  # or the interpreter looks for garbage in all of torch before it ends
    try:
        try:
            return _run(arguments)
        finally:  # here, where it can be told, and not when the interpreter ends; also after --help
            if sys.stdout is not None:
                sys.stdout.flush()
    except QuireError as error:
        _say(complaint(_in_flags(error)))
        return 2 if isinstance(error, (ConfigError, LoadError, InvalidParameter)) else 1
    except BrokenPipeError:
        # The reader of our output has left (`quire generate | head`); nothing more can be written to it.
        _drop_output()
        return 1
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        reason = shortage(error)
        if reason is None:
            raise
        _drop_output()
        _say(f"quire: error: {reason}")
        return 1


def _in_flags(error: QuireError) -> QuireError:
    """Imports what it needs, for there is mostly no error."""
    from quire.config.cluster import ClusterConfig
    from quire.config.engine import EngineConfig
    from quire.serve.config import ServerConfig

    return in_flags(error, EngineConfig, ServerConfig, ClusterConfig)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Whatever is still in the buffer of standard output goes nowhere, lest the interpreter fail at it in the end."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser(command: str | None = None) -> FlagParser:
    """The parser of `quire`, with the arguments of `command` alone; None: of every command, which takes all imports."""
    parser = FlagParser(prog="quire", description="An LLM inference and serving engine.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, meaning in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=meaning, description=meaning)
        if command is None or name == command:
            module = importlib.import_module(f"quire.cli.{name.replace('-', '_')}")
            module.configure(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    parser = make_parser(command)
    if command and not command.startswith("-") and command not in COMMANDS:
        parser.error(f"unknown command {shown(command)}{did_you_mean(command, COMMANDS)}")
    namespace: argparse.Namespace = parser.parse_args(arguments)
    if not hasattr(namespace, "run"):
        parser.print_help()
        return 2
    if command not in SERVING:
        logs.show_progress()
    return int(namespace.run(namespace))
