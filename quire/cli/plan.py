"""`quire plan train`; `quire plan MODEL` itself is not here yet. Owns where a model is found. Imports no torch."""

from __future__ import annotations

import argparse
import pathlib

from quire.bench.shape import FOLDER, PREFIX, shape_options
from quire.cli import plan_train
from quire.config.arch import ModelArch
from quire.config.flags import FlagParser
from quire.config.gguf import is_gguf
from quire.config.model import read_arch
from quire.core.errors import ConfigError, shown


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire plan train [MODEL] [options]"
    if isinstance(parser, FlagParser):
        plan_train.add_arguments(parser.add_mode(plan_train.NAME, plan_train.MEANING))


def run(namespace: argparse.Namespace) -> int:
    """ConfigError: only its mode `train` is there."""
    raise ConfigError("only quire plan train is there: see quire plan train --help")


def find_arch(model: str) -> ModelArch:
    """What `model` is described as, without reading a weight: a folder, a .gguf file, or shape:NAME."""
    if model.startswith(PREFIX):
        shape_options(model)
        return read_arch(FOLDER / model.removeprefix(PREFIX))
    path = pathlib.Path(model).expanduser()
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return read_arch(path)
    raise ConfigError(f"{shown(model)} is neither a folder with config.json, a .gguf file, nor {PREFIX}NAME")
