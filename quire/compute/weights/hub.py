"""Where a model is: a local folder or GGUF file, bundled with Quire, or on the Hugging Face hub.

Owns the meaning of the model argument; does not look inside the folder. Imports neither torch nor (before it is needed)
huggingface_hub.
"""

from __future__ import annotations

import pathlib
import re
from typing import Final

from quire.compute.weights.checkpoint import PICKLED
from quire.config.advice import no_model
from quire.config.gguf import is_gguf
from quire.config.shapes import BUNDLED, MODELS, PREFIX, shape_folder, shape_names
from quire.core.errors import ConfigError, LoadError, shown
from quire.core.spelling import did_you_mean
from quire.core.ticker import ticking

WANTED: Final = ("*.safetensors", "*.json", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja")
UNWANTED: Final = ("*/*", "consolidated*")
"""Subfolders and second copies of the weights in other layouts."""
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_CACHED: Final = re.compile(r".*/models--(.+)--(.+)/snapshots/[^/]+/?")
"""A model's folder in a cache of huggingface_hub."""


def find_checkpoint(model: str, revision: str = "", download_dir: str = "") -> pathlib.Path:
    """The folder or file of `model`: a bundled name ('' is the demo), a bundled shape:NAME, a local folder or GGUF
    file, or a hub's org/name.

    A local folder wins over a hub name. `revision` (branch, tag or commit) applies to the hub only.
    download_dir: where models of the hub are kept; empty: the hub's own folder.
    Raises LoadError if there is no such folder or it cannot be fetched, ConfigError for a revision elsewhere.
    """
    if model in BUNDLED:
        path = MODELS / BUNDLED[model]
        if not path.is_dir():
            raise LoadError(f"the bundled model is missing: {path} is not a folder; reinstall Quire or name a model")
    else:
        path = shape_folder(model) or pathlib.Path(model).expanduser()
    if path.is_dir():
        if revision:
            raise ConfigError(f"revision = {shown(revision)} is for hub models; {path} is a folder", param="revision")
        files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if files:
            raise LoadError(f"{path} has no config.json but GGUF files: name one of them, such as {files[0]}")
        if path.name in BUNDLED and model not in BUNDLED and not (path / "config.json").exists():
            raise LoadError(f"{no_model(path)}. {_hint(path.name)}")
        return path
    if path.exists():
        if not is_gguf(path):
            pickled = ", and pickled weights are never read: they can run code" if path.suffix in PICKLED else ""
            raise LoadError(
                f"{shown(model)} is a file{pickled}; name the folder of config.json and *.safetensors, or a *.gguf"
            )
        if revision:
            raise ConfigError(f"revision = {shown(revision)} is for hub models; {path} is a file", param="revision")
        return path
    if not _HUB_NAME.fullmatch(model):
        near = did_you_mean(PREFIX + model.removeprefix(PREFIX), [PREFIX + name for name in shape_names()])
        raise LoadError(
            f"{shown(model)} is neither an existing folder or .gguf file, a bundled {PREFIX}NAME, nor a hub name such"
            f" as org/name{near or '.'} {_hint(path.name)}"
        )
    return _download(model, revision, download_dir)


def _hint(name: str) -> str:
    """What to write for the model that comes with Quire. name: the last part of what was written instead."""
    if name in BUNDLED:
        return f"The model that comes with Quire is called {name}, without a slash or a dot."
    return f"The model that comes with Quire is called {BUNDLED['']}."


def called(model: str) -> str:
    """What messages call the model that is there: of a folder in the hub's cache the hub's name, which is what was
    given."""
    cached = _CACHED.fullmatch(model)
    return "/".join(cached.groups()) if cached else model or "the demo model"


def is_on_hub(model: str) -> bool:
    """Whether `find_checkpoint` would ask the hub: nothing here is called so. Names that are no hub's count too."""
    is_bundled = model in BUNDLED or shape_folder(model) is not None
    return not is_bundled and not pathlib.Path(model).expanduser().exists()


def _download(name: str, revision: str, download_dir: str) -> pathlib.Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with ticking(f"fetching {name} from the hub"):
            folder = huggingface_hub.snapshot_download(
                name,
                revision=revision or None,
                cache_dir=pathlib.Path(download_dir).expanduser() if download_dir else None,
                allow_patterns=list(WANTED),
                ignore_patterns=list(UNWANTED),
            )
    except LocalEntryNotFoundError:
        raise LoadError(
            f"{name} is not in the local hub cache and the hub cannot be reached (or HF_HUB_OFFLINE is set)."
            f" Fetch it where there is a network with 'hf download {name}', or name a local folder."
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise LoadError(f"cannot fetch {name} from the hub: {type(error).__name__}: {shown(str(error))}") from error
    return pathlib.Path(folder)
