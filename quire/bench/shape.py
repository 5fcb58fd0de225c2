"""Bundled model shapes for benchmarks: `shape:qwen3-0.6b` is a real config.json without a checkpoint."""

from __future__ import annotations

from typing import Final

from quire.config import shapes

PREFIX: Final = shapes.PREFIX
FOLDER: Final = shapes.FOLDER
shape_names = shapes.shape_names


def shape_options(model: str) -> dict[str, object]:
    """Engine options of `shape:<name>` by its folder: where config.json is, and what makes it run.

    Raises ConfigError for an unknown name.
    """
    shapes.check_shape(model)
    return {"model": str(FOLDER / model.removeprefix(PREFIX)), **shapes.RANDOM}
