"""Finds the subcommand, runs it, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed while running, 2 wrong command line, configuration or checkpoint (130: Ctrl-C, see `main`).
Invariant: only the module of the subcommand that was asked for is imported, so `quire --help` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from quire import __version__
from quire.config.flags import FlagParser, did_you_mean
from quire.core.errors import ConfigError, LoadError, QuireError, shown

COMMANDS = {
    "serve": "Serve a model over HTTP, with the OpenAI API and a page to talk to it.",
    "chat": "Talk to a model in this terminal.",
    "generate": "Complete a prompt and print the text.",
    "run-batch": "Answer a file of requests in OpenAI's batch format, without a server.",
    "bench": "Measure latency, throughput, a running server, or the kernels.",
    "kernels": "List the kernels, or explain which one runs and why.",
    "doctor": "Say what this machine has and what is wrong with it.",
}
"""Subcommand → help line. Its module, `quire.cli.<name>` with _ for -, has `configure(parser)` and
`run(namespace) -> int`."""


def run(arguments: list[str]) -> int:
    """Run `quire` with these arguments; returns the exit code."""
    try:
        return _run(arguments)
    except QuireError as error:
        print("quire: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, LoadError)) else 1
    except BrokenPipeError:
        # The reader of our output has left (`quire generate | head`); nothing more can be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    parser = FlagParser(prog="quire", description="An LLM inference and serving engine.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, meaning in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=meaning, description=meaning)
        if name == command:
            module = importlib.import_module(f"quire.cli.{name.replace('-', '_')}")
            module.configure(subparser)
            subparser.set_defaults(run=module.run)
    if command and not command.startswith("-") and command not in COMMANDS:
        parser.error(f"unknown command {shown(command)}{did_you_mean(command, COMMANDS)}")
    namespace: argparse.Namespace = parser.parse_args(arguments)
    if not hasattr(namespace, "run"):
        parser.print_help()
        return 2
    return int(namespace.run(namespace))
