"""Adapters as clients know them: `LoRARequest` names one, `AdapterFacts` says what an engine has under a name.

Owns no weights (`compute/adapters`) and no file's meaning (`config/adapter`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from quire.core.errors import ConfigError, InvalidParameter, shown

MAX_NAME_CHARS: Final = 256


class LoRARequest(msgspec.Struct, frozen=True):
    """The adapter that prompts are for, spelled as in vLLM."""

    lora_name: str
    lora_int_id: int = 1
    """Taken and not looked at: a name stands for one adapter at a time."""
    lora_path: str = ""
    """Folder in PEFT's layout; empty: one that the engine has under this name."""
    load_inplace: bool = False
    """Read the folder again, also where the name is known."""


class AdapterFacts(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests can name."""

    name: str
    path: str
    content_id: str
    """Hash of what it is made of: equal ones give equal tokens, whatever they are called."""
    rank: int
    """Largest of its matrices."""


def check_adapter_name(name: Any, param: str = "lora_name") -> str:
    """The name; InvalidParameter if no request could ask for it as it looks."""
    if not isinstance(name, str) or not name.strip() or name != name.strip() or not name.isprintable():
        raise InvalidParameter(param, name, "a printable text that neither begins nor ends with a blank")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidParameter(param, name, f"at most {MAX_NAME_CHARS} characters long")
    return name


def lora_module(text: str) -> tuple[str, str]:
    """(name, path) of an item of --lora-modules: NAME=PATH, or vLLM's JSON object. Raises ConfigError."""
    if text.lstrip().startswith("{"):
        try:
            item = msgspec.json.decode(text)
            return check_adapter_name(item["name"], "name"), str(item["path"])
        except (msgspec.DecodeError, KeyError, TypeError):
            raise ConfigError(
                f"lora_modules: {shown(text)} must be an object with 'name' and 'path', or NAME=PATH",
                param="lora_modules",
            ) from None
    name, sign, path = text.partition("=")
    if not sign or not path:
        raise ConfigError(
            f"lora_modules: {shown(text)} must be NAME=PATH, a folder in PEFT's layout", param="lora_modules"
        )
    return check_adapter_name(name, "lora_modules"), path


def module_names(lora_modules: Iterable[str]) -> set[str]:
    """Of the items of --lora-modules. Raises ConfigError."""
    return {name for name, _ in map(lora_module, lora_modules)}
