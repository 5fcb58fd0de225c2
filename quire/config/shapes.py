"""Where bundled models are, and shapes: `shape:NAME` is a config.json of a folder, without weights or a tokenizer."""

from __future__ import annotations

import pathlib
from typing import Final

from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean_and_known

PREFIX: Final = "shape:"
MODELS: Final = pathlib.Path(__file__).resolve().parents[1] / "_models"
BUNDLED: Final = {"": "demo", "demo": "demo"}
"""Model argument → folder of `MODELS`. A local folder of such a name is reached as ./demo."""
FOLDER: Final = pathlib.Path(__file__).resolve().parents[1] / "bench" / "shapes"
RANDOM: Final[dict[str, object]] = {"load_format": "dummy", "skip_tokenizer_init": True}
"""Options of the engine with which a shape runs: seeded random weights, and token ids only if no tokenizer is named."""


def shape_folder(model: str) -> pathlib.Path | None:
    """Of the bundled shape that `model` names, None: it names none."""
    folder = FOLDER / model.removeprefix(PREFIX)
    is_shape = model.startswith(PREFIX) and folder.parent == FOLDER and (folder / "config.json").exists()
    return folder if is_shape else None


def check_shape(model: str, load_format: str = "auto") -> None:
    """ConfigError where no bundled shape is called `model`, or `load_format` is one that reads weights."""
    names = shape_names()
    if model.removeprefix(PREFIX) not in names:
        known = [PREFIX + each for each in names]
        raise ConfigError(
            f"{shown(model)} is not a bundled shape{did_you_mean_and_known(model, known)}.", param="model"
        )
    if load_format not in ("auto", RANDOM["load_format"]):
        raise ConfigError(
            f"load_format = {load_format!r} reads weights, and {model} has none: leave it out, and they are random",
            param="load_format",
        )


def check_has_weights(model: str, use: str) -> None:
    """ConfigError where `model` is written as a shape: it has no weights to `use`."""
    if model.startswith(PREFIX):
        check_shape(model)
        raise ConfigError(
            f"{model} is a shape and has no weights to {use}: name a folder or a hub's model", param="model"
        )


def shape_names() -> list[str]:
    """Names of the bundled shapes."""
    return sorted(folder.name for folder in FOLDER.iterdir() if (folder / "config.json").exists())
