"""From the command line to an engine: the MODEL argument, the engine's flags, loading."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Collection
from typing import TYPE_CHECKING

from quire.cli.interrupt import instant_exit
from quire.compute.weights.hub import find_checkpoint, is_on_hub
from quire.config.advice import check_adapter_folder
from quire.config.command_line import CONFIG_FLAG
from quire.config.division import check_division, check_ranks, is_divided
from quire.config.engine import EngineConfig
from quire.config.flags import FlagParser, add_flags, given_values
from quire.config.model import read_arch
from quire.config.options import make_options
from quire.config.resolve import check_length, check_rounding
from quire.core.adapters import lora_module
from quire.core.errors import ConfigError, QuireError, shown
from quire.engine.garbage import no_gc

if TYPE_CHECKING:
    from quire.engine.llm import LLM


def add_engine_flags(
    parser: argparse.ArgumentParser, *, skip: Collection[str] = (), default: str = "the bundled demo model"
) -> None:
    """Add the MODEL argument and the flags of `EngineConfig`. default: what is taken without MODEL, in words."""
    parser.add_argument(
        "model_argument", nargs="?", default="", metavar="MODEL",
        help=f"folder, .gguf file, hub name, or shape:NAME: random weights of that shape, token ids only; without it"
        f" {default} is used",
    )  # fmt: skip
    add_flags(parser, EngineConfig, title="engine options", skip=skip)
    parser.add_argument(
        CONFIG_FLAG, metavar="FILE.yaml",
        help="options of this command as a YAML mapping, `max-num-seqs: 64`; those on the command line win",
    )  # fmt: skip
    if isinstance(parser, FlagParser):
        parser.knows_others = True


def engine_config(namespace: argparse.Namespace, **defaults: object) -> EngineConfig:
    """The engine's options as given; `defaults` stand in for flags that were not given.

    Raises ConfigError when MODEL and --model disagree, a value is out of range, ranks cannot share the model or do what
    was asked, or the device does not round its weights so.
    """
    config = simulated_config(namespace, **defaults)
    check_ranks(config)
    if config.device != "auto":  # said before torch is imported
        check_rounding(config, config.device)
    return config


def simulated_config(namespace: argparse.Namespace, **defaults: object) -> EngineConfig:
    """The same of an engine that is not built, for which `device` says nothing."""
    given = given_values(namespace, EngineConfig)
    values = defaults | given
    argument = getattr(namespace, "model_argument", "")
    if argument and given.get("model", argument) != argument:
        raise ConfigError(f"MODEL {shown(argument)} and --model {shown(given['model'])} disagree: give one of them")
    model = str(argument or values.get("model", "") or getattr(namespace, "config_model", ""))
    values["model"] = model
    config = make_options(EngineConfig, values)
    _check_adapters(config)
    _check_model(config)
    return config


def _check_model(config: EngineConfig) -> None:
    """ConfigError where the model has not so many positions, or cannot be divided among so many ranks: this is said
    before torch is imported. A model that is not here, or cannot be read, is left to the engine's words for it."""
    divided = config.device != "null" and is_divided(config)
    if not (divided or config.max_model_len) or is_on_hub(config.model):
        return
    try:
        arch = read_arch(find_checkpoint(config.model, config.revision), config.hf_overrides)
    except QuireError:
        return
    check_length(config, arch)
    if divided:
        check_division(config, arch)


def _check_adapters(config: EngineConfig) -> None:
    """ConfigError for folders of adapters that are none: this is said before a model is loaded."""
    for name, path in map(lora_module, config.lora_modules):
        check_adapter_folder(path, f"--lora-modules {name}={path}")
    if config.lora_root and not pathlib.Path(config.lora_root).expanduser().is_dir():
        raise ConfigError(f"--lora-root: {shown(config.lora_root)}: there is no such folder")


def load_llm(config: EngineConfig) -> LLM:
    """The offline engine for `config`; Ctrl-C while it loads ends the process."""
    with instant_exit():
        with no_gc():
            from quire.engine.llm import LLM

        return LLM.of_command_line(config)
