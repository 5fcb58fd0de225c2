"""Reading JSON and YAML objects that others wrote: bounded, regular files only, each field with its type and limits.

Owns no meaning. Invariant: whatever the bytes are, the answer is a value inside the stated limits or a ConfigError
that names the file, the field, the value and the limit.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from quire.core.errors import SHOWN_CHARS, ConfigError, shown
from quire.core.files import read_regular

MAX_JSON_BYTES: Final = 64 << 20
MAX_YAML_BYTES: Final = 1 << 20


def read_object(path: pathlib.Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a regular file of at most `max_bytes`; raises ConfigError for anything else."""
    return parse_object(_read_regular(path, max_bytes), path)


def parse_object(text: bytes, path: pathlib.Path) -> dict[str, Any]:
    """The JSON object that was read from a file; raises ConfigError for anything else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    except ValueError as error:  # bad JSON, bad UTF-8, or an integer of thousands of digits
        raise ConfigError(f"{path} is not valid JSON: {shown(str(error))}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {shown(value)}")
    return value


@functools.cache
def _once_loader() -> Any:
    """A loader of plain values alone, with each key of a mapping once: of two the last one would count without a
    word."""
    import yaml  # a quarter of what `quire --help` would import, and few name a file of options

    class OnceLoader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: Any) -> Any:
            """As of YAML. Raises a YAMLError for a key that is there already, before `<<` brings others beside it."""
            node, seen = super().compose_mapping_node(anchor), set[str]()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        reason = f"{key.value} is given twice"
                        raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
                    seen.add(key.value)
            return node

    return OnceLoader


def read_yaml(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML (or JSON) file of options, of plain values alone, and the line of each of its keys, from 1;
    raises ConfigError for anything else."""
    import yaml

    text = _read_regular(path, MAX_YAML_BYTES)
    try:
        loader = _once_loader()(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date or number that is none
        raise ConfigError(f"{path} is not valid YAML{_complaint(error)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a mapping of options to values, not {shown(value)}")
    return value, {str(key.value): key.start_mark.line + 1 for key, _ in node.value}


def _complaint(error: Exception) -> str:
    """Line, column and reason, in one line that a terminal can show."""
    import yaml

    place, text = "", str(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f", line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        text = f"{error.problem}{f' {error.context}' if error.context else ''}"
    plain = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return f"{place}: {plain if len(plain) <= SHOWN_CHARS else plain[: SHOWN_CHARS - 1] + '…'}"


def _read_regular(path: pathlib.Path, max_bytes: int) -> bytes:
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


class Watched(dict[str, Any]):
    """An object that remembers which of its keys were asked for, there or not: `asked`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()
        self.assumed: dict[str, int] = {}
        """Key that is not there, of an integer → the default that was taken."""

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self.asked.add(name)
        return super().get(name, default)

    def with_values(self, **values: Any) -> Watched:
        """A copy with other values, whose reading is remembered here."""
        copy = Watched({**self, **values})
        copy.asked, copy.assumed = self.asked, self.assumed
        return copy


class Fields:
    """Typed access to one JSON object; `where` names it in errors. A field that is null counts as absent.

    aliases: name by which a field is asked for → name that it has in the object, where they differ.
    """

    def __init__(self, values: dict[str, Any], where: str, aliases: Mapping[str, str] | None = None) -> None:
        self.values = values
        self.where = where
        self._aliases = aliases or {}

    def __contains__(self, name: str) -> bool:
        return self.values.get(self._aliases.get(name, name)) is not None

    def error(self, name: str, limit: str) -> ConfigError:
        """The error for a bad value of `name`, to be raised by the caller."""
        name = self._aliases.get(name, name)
        if name not in self.values:
            return ConfigError(f"{self.where}: {name} is missing; it must be {limit}", param=name)
        return ConfigError(f"{self.where}: {name} = {shown(self.values[name])} must be {limit}", param=name)

    def integer(self, name: str, low: int, high: int, default: int | None = None, *, bound: str = "") -> int:
        """An integer in [low, high]; `default` when absent, an error if that is None. bound: name of the field whose
        value `high` is, for the error to say."""
        value = self._value(name, default)
        if not is_integer(value) or not low <= value <= high:
            whose = f"{self._aliases.get(bound, bound)} = " if bound else ""
            raise self.error(name, f"an integer from {low:,} to {whose}{high:,}")
        if name not in self and isinstance(self.values, Watched):
            self.values.assumed[self._aliases.get(name, name)] = int(value)
        return int(value)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; `default` when absent, an error if that is None."""
        value = self._value(name, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not low <= value <= high or not math.isfinite(value):
            raise self.error(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false; `default` when absent."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of `allowed`; `default` when absent, an error if that is None."""
        value = self._value(name, default)
        if value not in allowed:
            raise self.error(name, f"one of {', '.join(allowed)}")
        return str(value)

    def nested(self, name: str) -> Fields:
        """The object under `name`; empty when absent."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(self._aliases.get(name, name))
        return default if value is None else value


def is_integer(value: object) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
