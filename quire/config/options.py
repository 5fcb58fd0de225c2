"""Options structs as data: each field with its type, meaning and spellings, and the one check of a value.

Owns what a value may be and what an error says; the command line (`config/flags.py`) and keyword arguments of Python
(`keyword_options`) share it. Does not own the options (`config/engine.py`, ...).
`Meta(extra=...)` of a field may have `words` (other spellings → values), `refused` (values of other engines → what to
do), `counts` (32k and 1M are numbers) and `json_list` (a list may be one word of JSON, as vLLM has it).
"""

from __future__ import annotations

import functools
import inspect as python_inspect
import json
import math
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import inspect

from quire.config.command_line import dashed
from quire.config.foreign import FOREIGN, State, suggestion
from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean

Options = TypeVar("Options", bound=msgspec.Struct)
_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_POWERS: Final = {"k": 1, "m": 2, "g": 3}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of an options struct, ready to become a flag or a row of docs/options.md."""

    name: str
    kind: inspect.Type
    """The field's type with `Meta` taken off; for a list the type of the whole list."""
    annotation: Any
    """What msgspec converts one value to: the field's annotation, or the item type of a list."""
    default: object
    meaning: str
    extra: Mapping[str, Any]

    @property
    def flag(self) -> str:
        """`max_num_seqs` → `--max-num-seqs`."""
        return dashed(self.name)

    @property
    def is_switch(self) -> bool:
        """True for booleans, which become `--x` and `--no-x`."""
        return isinstance(self.kind, inspect.BoolType)

    @property
    def is_list(self) -> bool:
        """True if the flag takes one or more values."""
        return isinstance(self.kind, inspect.ListType)

    @property
    def item_kind(self) -> inspect.Type:
        """Type of one value: the list's items, or the type beside None."""
        kind = _bare(self.kind.item_type) if isinstance(self.kind, inspect.ListType) else self.kind
        if isinstance(kind, inspect.UnionType):
            kind = next(_bare(each) for each in kind.types if not isinstance(each, inspect.NoneType))
        return kind

    @property
    def choices(self) -> tuple[object, ...]:
        """The values of a Literal in the order in which they were written; empty for other types."""
        return _literal_values(self.annotation) if isinstance(self.item_kind, inspect.LiteralType) else ()

    @property
    def default_text(self) -> str:
        """The default as the help shows it."""
        return f"the model's, else {self._own_default}" if self.extra.get("proposed") else self._own_default

    @property
    def _own_default(self) -> str:
        if self.default in ("", None) or self.default == []:
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, list):
            return " ".join(str(item) for item in self.default)
        return str(self.default)

    @property
    def words(self) -> Mapping[str, object]:
        """Other spellings of values, in lower case."""
        return dict(self.extra.get("words", {}))

    def read(self, value: object) -> object:
        """One value, for a list one item, as the field holds it. ValueError says what it must be."""
        if isinstance(value, (str, int)):
            word = str(value).strip().lower()
            if word in self.words:
                return self.words[word]
            for refused, instead in self.extra.get("refused", {}).items():
                if word in refused.split() and word not in map(str, self.choices):
                    raise ValueError(f"{shown(value)} is known in vLLM, not in Quire: {instead}")
        try:
            made: object = msgspec.convert(self._plain(value), self.annotation, strict=not isinstance(value, str))
        except (msgspec.ValidationError, ValueError, RecursionError):
            hint = did_you_mean(str(value), (str(choice) for choice in self.choices))
            raise ValueError(f"{shown(value)} is not allowed: it must be {limit(self)}{hint}") from None
        if isinstance(made, float) and not (math.isfinite(made) or (made == math.inf and self.extra.get("may_be_inf"))):
            raise ValueError(f"{shown(value)} is not allowed: it must be finite, {limit(self)}")
        return made

    def _plain(self, value: object) -> object:
        """What msgspec takes: JSON text as an object, 32k as a number, a path or a number of bytes as text."""
        if isinstance(value, str):
            if isinstance(self.item_kind, inspect.DictType):
                return json.loads(value)
            return count(value) if self.extra.get("counts") else value
        if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
            return str(value).removeprefix("torch.")  # as vLLM takes it
        if isinstance(self.item_kind, inspect.StrType):
            if isinstance(value, os.PathLike):
                return os.fspath(value)
            return str(value) if type(value) is int else value
        return value

    def read_word(self, text: str) -> object:
        """One word of the command line: what `read` gives, or a list of it for a word of JSON that has several."""
        if not self.extra.get("json_list") or not text.lstrip().startswith("["):
            return self.read(text)
        try:
            items = json.loads(text)
        except (ValueError, RecursionError):  # an address of IPv6 begins so too
            return self.read(text)
        return [self.read(item) for item in items]

    def read_all(self, value: object) -> object:
        """A value of Python, a list as a whole; see `read`."""
        if not self.is_list:
            return self.read(value)
        items = value if isinstance(value, (list, tuple)) else [value]
        return [self.read(item) for item in items]


def count(text: str) -> object:
    """'32k' → 32000, '32K' → 32768, as vLLM has it; any other text unchanged."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return text
    number, unit = match.groups()
    scaled = float(number) * (1000 if unit.islower() else 1024) ** _POWERS[unit.lower()]
    return int(scaled) if scaled == int(scaled) else text


def keyword_options(options: type[Options], values: Mapping[str, object], what: str) -> Options:
    """`options` from keyword arguments of Python, with vLLM's names and values, checked.

    None stands for the default. Raises ConfigError for a bad value and for a name that nothing has, in the words of
    the command line; `what` takes the arguments.
    """
    described = {option.name: option for option in describe(options)}
    found: dict[str, object] = {}
    for name, value in values.items():
        foreign = FOREIGN.get(name)
        if name not in described and foreign is not None and foreign.state is State.RENAMED:
            name = foreign.because
        if name in described:
            if value is None:
                continue
            try:
                found[name] = described[name].read_all(value)
            except ValueError as error:
                raise ConfigError(f"{name} = {error}", param=name) from None
        elif foreign is None:
            raise ConfigError(f"{what} has no option {shown(name)}{suggestion(name, described)}", param=name)
        elif objection := foreign.objection(value):
            raise ConfigError(objection, param=name)
    return make_options(options, found)


def keyword_signature(options: type[msgspec.Struct], first: str) -> python_inspect.Signature:
    """What help() and notebooks show for a method that takes `first` and the fields of `options` as keywords."""
    kind = python_inspect.Parameter
    parameters = [kind("self", kind.POSITIONAL_OR_KEYWORD)]
    for option in sorted(describe(options), key=lambda each: each.name != first):
        place = kind.POSITIONAL_OR_KEYWORD if option.name == first else kind.KEYWORD_ONLY
        parameters.append(kind(option.name, place, default=option.default))
    return python_inspect.Signature([*parameters, kind("options_of_vllm", kind.VAR_KEYWORD)])


def make_options(options: type[Options], values: Mapping[str, object]) -> Options:
    """`options(**values)`, checked by its `verify()` if it has one (ConfigError)."""
    made = options(**values)
    verify = getattr(made, "verify", None)
    if verify is not None:
        verify()
    return made


@functools.cache
def describe(options: type[msgspec.Struct]) -> list[Option]:
    """The fields of an options struct in their order. TypeError for a type that no flag can carry."""
    hints = typing.get_type_hints(options, include_extras=True)
    described: list[Option] = []
    info = inspect.type_info(options)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        option = Option(
            name=field.name,
            kind=_bare(field.type),
            annotation=_item_annotation(hints[field.name]),
            default=_default(field),
            meaning=_meaning(field.type),
            extra=_extra(field.type),
        )
        if not isinstance(option.item_kind, _CARRIED):
            raise TypeError(f"{options.__name__}.{field.name}: no flag can carry {field.type}")
        described.append(option)
    return described


_CARRIED = (
    inspect.BoolType,
    inspect.IntType,
    inspect.FloatType,
    inspect.StrType,
    inspect.LiteralType,
    inspect.DictType,
)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _meaning(kind: inspect.Type) -> str:
    schema = kind.extra_json_schema if isinstance(kind, inspect.Metadata) else None
    return str((schema or {}).get("description", ""))


def _extra(kind: inspect.Type) -> Mapping[str, Any]:
    return (kind.extra or {}) if isinstance(kind, inspect.Metadata) else {}


def _default(field: inspect.Field) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _item_annotation(annotation: Any) -> Any:
    """`Annotated[list[X], ...]` → X; any other annotation unchanged."""
    bare = typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    return typing.get_args(bare)[0] if typing.get_origin(bare) is list else annotation


def _literal_values(annotation: Any) -> tuple[object, ...]:
    """The values of the first Literal inside `annotation`."""
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    for part in typing.get_args(annotation):
        values = _literal_values(part)
        if values:
            return values
    return ()


def limit(option: Option) -> str:
    """What a value must be, in words: 'an integer between 0 and 8'."""
    kind = option.item_kind
    if isinstance(kind, inspect.BoolType):
        return "on or off"
    if option.choices:
        words = "one of " + ", ".join(str(choice) for choice in option.choices)
    elif isinstance(kind, inspect.IntType):
        words = "an integer" + _bounds(kind.ge, kind.gt, kind.le, kind.lt)
    elif isinstance(kind, inspect.FloatType):
        words = "a number" + _bounds(kind.ge, kind.gt, kind.le, kind.lt)
    elif isinstance(kind, inspect.DictType):
        words = "a JSON object"
    else:
        assert isinstance(kind, inspect.StrType)
        words = "text" + _bounds(kind.min_length, None, kind.max_length, None, " characters")
        words += f" that matches {kind.pattern}" if kind.pattern else ""
    also = [*option.words, *(["32k or 1M"] if option.extra.get("counts") else [])]
    words += f" (also {', '.join(also)})" if also else ""
    return words + (" (one or more)" if option.is_list else "")


def _bounds(least: float | None, above: float | None, most: float | None, below: float | None, unit: str = "") -> str:
    if least is not None and most is not None:
        return f" between {least} and {most}{unit}"
    named = (("of at least", least), ("above", above), ("of at most", most), ("below", below))
    parts = [f"{words} {bound}{unit}" for words, bound in named if bound is not None]
    return " " + " and ".join(parts) if parts else ""
