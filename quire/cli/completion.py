"""`quire completion SHELL`: a script that completes commands, flags and their values, for a shell to read at its start.

Owns what is offered after a flag. The script is made by shtab from the parsers of all commands, so it is as current as
they are; it is static, and completing starts no Python.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from quire.core.errors import ConfigError, shown

Offer = dict[str, "str | dict[str, str]"]
"""What shtab takes for an argument: a shell's name and what completes it there."""

SHELLS = {
    "bash": "quire completion bash > ~/.local/share/bash-completion/completions/quire",
    "zsh": "quire completion zsh > ~/.zsh/completions/_quire   (with that folder in fpath before compinit)",
    "fish": "quire completion fish > ~/.config/fish/completions/quire.fish",
}
"""Shell → how its script is installed."""
FILE_FLAGS = {"--config", "--output-json", "--output", "--plot", "--profile", "--record", "--dataset-path",
              "--chat-template", "--api-key-file", "--ssl-keyfile", "--ssl-certfile", "--input-file",
              "--output-file", "--trace"}  # fmt: skip
FOLDER_FLAGS = {"--download-dir", "--tokenizer", "--data-dir"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = f"quire completion {{{','.join(SHELLS)}}}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "to install:\n" + "\n".join(f"  {line}" for line in SHELLS.values())
    parser.add_argument("shell", metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(namespace: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    if namespace.shell not in SHELLS:
        raise ConfigError(f"there is no completion for {shown(namespace.shell)}; there is for {', '.join(SHELLS)}")
    print(script(namespace.shell))
    return 0


def script(shell: str) -> str:
    """The script for "bash", "zsh" or "fish"."""
    import shtab  # only this command needs it

    from quire.cli.command import make_parser

    parser = make_parser()
    for action in _actions(parser):
        _offer(action, shtab.FILE, shtab.DIRECTORY)
    return str(shtab.complete(parser, shell=shell))


def _offer(action: argparse.Action, files: Offer, folders: Offer) -> None:
    """Say what may follow `action`: its listed values, files, or folders."""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices is None and metavar.startswith("{"):
        action.choices = metavar.strip("{}").split(",")
    elif action.dest == "shell" and not action.option_strings:
        action.choices = list(SHELLS)
    elif metavar in ("FILE", "MODEL") or FILE_FLAGS.intersection(action.option_strings):
        action.complete = files  # type: ignore[attr-defined]
    elif metavar == "FOLDER" or FOLDER_FLAGS.intersection(action.option_strings):
        action.complete = folders  # type: ignore[attr-defined]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from itertools.chain.from_iterable(_actions(each) for each in action.choices.values())
        else:
            yield action
