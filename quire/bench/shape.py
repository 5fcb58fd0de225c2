"""Bundled model shapes for benchmarks: `shape:qwen3-0.6b` is a real config.json without a checkpoint."""

from __future__ import annotations

from typing import Final

from quire.config import shapes
from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean_and_known

PREFIX: Final = shapes.PREFIX
FOLDER: Final = shapes.FOLDER
shape_names = shapes.shape_names


def shape_options(model: str) -> dict[str, object]:
    """Engine options that make `shape:<name>` run: its folder, seeded random weights, token ids only.

    Raises ConfigError for an unknown name.
    """
    name = model.removeprefix(PREFIX)
    if name not in shape_names():
        known = [PREFIX + each for each in shape_names()]
        raise ConfigError(f"{shown(model)} is not a bundled shape{did_you_mean_and_known(model, known)}.")
    return {"model": str(FOLDER / name), "load_format": "dummy", "skip_tokenizer_init": True}
