"""Where bundled models are, and shapes: `shape:NAME` is a config.json of a folder, without weights or a tokenizer."""

from __future__ import annotations

import pathlib
from typing import Final

PREFIX: Final = "shape:"
MODELS: Final = pathlib.Path(__file__).resolve().parents[1] / "_models"
BUNDLED: Final = {"": "demo", "demo": "demo"}
"""Model argument → folder of `MODELS`. A local folder of such a name is reached as ./demo."""
FOLDER: Final = pathlib.Path(__file__).resolve().parents[1] / "bench" / "shapes"


def shape_folder(model: str) -> pathlib.Path | None:
    """Of the bundled shape that `model` names, None: it names none."""
    folder = FOLDER / model.removeprefix(PREFIX)
    is_shape = model.startswith(PREFIX) and folder.parent == FOLDER and (folder / "config.json").exists()
    return folder if is_shape else None


def shape_names() -> list[str]:
    """Names of the bundled shapes."""
    return sorted(folder.name for folder in FOLDER.iterdir() if (folder / "config.json").exists())
