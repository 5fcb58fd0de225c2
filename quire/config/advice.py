"""Sentences for people whose model is not one that Quire can load: what it is, and what to do instead. Torch-free.

Owns what is recognised in a folder or a config.json that is refused anyway. Does not own the refusals.
"""

from __future__ import annotations

import difflib
import os
import pathlib
from collections.abc import Iterable
from typing import Any, Final

from quire.config.fields import read_object
from quire.core.errors import ConfigError, shown

LISTED: Final = 8
"""Most names of a folder in one message."""
NEAR: Final = 0.6
"""Likeness of names from which an architecture counts as near another."""
MOST_NEAR: Final = 3
"""Most architectures named as near."""
ADAPTER: Final = "adapter_config.json"


def not_supported(name: object, known: Iterable[str]) -> str:
    """A sentence on an architecture that is none of `known`."""
    families = {_stem(family): family for family in known}
    names = [family.removesuffix("ForCausalLM") for family in families.values()]
    near = difflib.get_close_matches(_stem(name), families, n=MOST_NEAR, cutoff=NEAR) if isinstance(name, str) else []
    others = "which is another one" if len(near) == 1 else "which are others"
    nearest = f" Nearest to it {_is_or_are([families[one] for one in near])}, {others}." if near else ""
    behind = " (with ForCausalLM behind its name)" if names != list(families.values()) else ""
    return (
        f"the architecture {shown(name)} is not supported.{nearest} Take a checkpoint of one that is{behind}:"
        f" {', '.join(names)}."
    )


def _is_or_are(names: list[str]) -> str:
    return f"is {names[0]}" if len(names) == 1 else f"are {', '.join(names[:-1])} and {names[-1]}"


def _stem(name: str) -> str:
    """Without what all have in common, as ForCausalLM."""
    return name.split("For")[0].lower()


def no_model(folder: pathlib.Path) -> str:
    """A sentence on a folder without config.json."""
    if (folder / ADAPTER).exists():
        return _adapter(folder)
    inside = [path.parent for path in (*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json"))]
    inside = sorted([*inside, *folder.glob("*.gguf"), *folder.glob("*/*.gguf")])
    advice = "name a folder that has config.json and *.safetensors, or a .gguf file"
    if inside:
        advice = f"name {inside[0]}" if len(inside) == 1 else f"name one of {len(inside)} models in it, as {inside[0]}"
    return f"{folder} has no config.json, so it is not a model's folder; it holds {listing(folder)}: {advice}"


def listing(folder: pathlib.Path) -> str:
    """What is in a folder, in a few words."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"nothing that can be listed ({error.strerror})"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(shown(name) for name in names[:LISTED])}{more}" if names else "nothing"


def check_adapter_folder(path: str, what: str) -> None:
    """ConfigError where `path` holds no adapter. what: the flag or argument that names it."""
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        said = "is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(f"{what}: {shown(path)}: {said}; name a folder in PEFT's layout, with {ADAPTER}")
    if not (folder / ADAPTER).exists():
        is_model = (folder / "config.json").exists()
        said = "is a model, not an adapter" if is_model else f"holds {listing(folder)}"
        raise ConfigError(f"{what}: {shown(path)} {said}: name a folder in PEFT's layout, with {ADAPTER}")


def _adapter(folder: pathlib.Path) -> str:
    try:
        values: dict[str, Any] = read_object(folder / ADAPTER)
    except ConfigError:
        values = {}
    base = values.get("base_model_name_or_path")
    of = f" of {shown(base)}" if isinstance(base, str) and base else ""
    return (
        f"{folder} is an adapter (LoRA){of}, not a model: name its base model, and add --enable-lora --lora-modules"
        f" NAME={folder}; or write a checkpoint that it is merged into: quire merge MODEL {folder} OUTDIR"
    )
