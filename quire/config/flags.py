"""Command-line flags made from an options struct: spelling, help, value checks, and the options page of the docs.

Owns how a field becomes a flag. Does not own the options (`config/engine.py`, ...) nor the commands (`cli/`).
Invariants: a flag that was not given leaves the struct's own default; a bad value or an unknown flag exits with 2
and names the flag, the value, the limit, or the nearest flag; nothing is abbreviated.
"""

from __future__ import annotations

import argparse
import difflib
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from quire.core.errors import shown

Options = TypeVar("Options", bound=msgspec.Struct)
Converter = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Option:
    """One field of an options struct, ready to become a flag or a row of the options page."""

    name: str
    kind: inspect.Type
    """The field's type with `Meta` taken off; for a list the type of the whole list."""
    annotation: Any
    """What msgspec converts one value to: the field's annotation, or the item type of a list."""
    default: object
    meaning: str

    @property
    def flag(self) -> str:
        """`max_num_seqs` → `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

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
        if self.default in ("", None) or self.default == []:
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, list):
            return " ".join(str(item) for item in self.default)
        return str(self.default)


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest flag, never abbreviates, and keeps an error to two lines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but what is not known is an error here, where the nearest flag can be named."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._explain_unknown(unknown))
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is; exit with 2."""
        self.exit(2, f"{self.prog}: error: {message}\nSee: {self.prog} --help\n")

    def _explain_unknown(self, unknown: Sequence[str]) -> str:
        flags = [text.split("=", 1)[0] for text in unknown if text.startswith("-")]
        if not flags:
            return f"unexpected argument {shown(unknown[0])}"
        spelling = flags[0].replace("_", "-")
        return f"unknown option {flags[0]}{did_you_mean(spelling, self._option_string_actions)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of `known`, or an empty string when none is near."""
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def describe(options: type[msgspec.Struct]) -> list[Option]:
    """The fields of an options struct in their order. TypeError for a type that no flag can carry."""
    hints = typing.get_type_hints(options, include_extras=True)
    described = []
    info = inspect.type_info(options)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        option = Option(
            name=field.name,
            kind=_bare(field.type),
            annotation=_item_annotation(hints[field.name]),
            default=_default(field),
            meaning=_meaning(field.type),
        )
        if not isinstance(option.item_kind, _CARRIED):
            raise TypeError(f"{options.__name__}.{field.name}: no flag can carry {field.type}")
        described.append(option)
    return described


def add_flags(
    parser: argparse.ArgumentParser, options: type[msgspec.Struct], *, title: str, skip: Collection[str] = ()
) -> None:
    """Add one flag a field of `options` to `parser`, in a group called `title`, without the fields in `skip`."""
    group = parser.add_argument_group(title)
    for option in describe(options):
        if option.name not in skip:
            _add_flag(group, option)


def given_values(namespace: argparse.Namespace, options: type[msgspec.Struct]) -> dict[str, object]:
    """Field name → value for the flags of `options` that stand on the command line."""
    return {name: getattr(namespace, name) for name in options.__struct_fields__ if hasattr(namespace, name)}


def read_flags(namespace: argparse.Namespace, options: type[Options], **overrides: object) -> Options:
    """The struct that the command line describes, checked; `overrides` win."""
    return make_options(options, given_values(namespace, options) | overrides)


def make_options(options: type[Options], values: Mapping[str, object]) -> Options:
    """`options(**values)`, checked by its `verify()` if it has one (ConfigError)."""
    made = options(**values)
    verify = getattr(made, "verify", None)
    if verify is not None:
        verify()
    return made


def options_table(options: type[msgspec.Struct]) -> str:
    """A Markdown table of the flags of `options`: flag, values, default, meaning."""
    rows = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    for option in describe(options):
        flag = f"`{option.flag}`" + (f", `--no-{option.flag[2:]}`" if option.is_switch else "")
        cells = [flag, _limit(option), option.default_text, option.meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


_CARRIED = (inspect.BoolType, inspect.IntType, inspect.FloatType, inspect.StrType, inspect.LiteralType)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _meaning(kind: inspect.Type) -> str:
    schema = kind.extra_json_schema if isinstance(kind, inspect.Metadata) else None
    return str((schema or {}).get("description", ""))


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


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    text = f"{option.meaning} (default: {option.default_text})".replace("%", "%%")
    common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
    if option.is_switch:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    else:
        common["nargs"] = "+" if option.is_list else None
        group.add_argument(option.flag, type=_converter(option), metavar=_metavar(option), **common)


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(str(choice) for choice in option.choices) + "}"
    return {inspect.IntType: "N", inspect.FloatType: "X"}.get(type(option.item_kind), "TEXT")


def _converter(option: Option) -> Converter:
    """A function from the command line's text to a checked value; its error says value, limit and nearest choice."""

    def convert(text: str) -> object:
        try:
            value: object = msgspec.convert(text, option.annotation, strict=False)
        except msgspec.ValidationError:
            hint = did_you_mean(text, (str(choice) for choice in option.choices))
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not allowed: it must be {_limit(option)}{hint}"
            ) from None
        if isinstance(value, float) and math.isnan(value):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not allowed: it must be {_limit(option)}")
        return value

    return convert


def _limit(option: Option) -> str:
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
    else:
        assert isinstance(kind, inspect.StrType)
        words = "text" + _bounds(kind.min_length, None, kind.max_length, None, " characters")
        words += f" that matches {kind.pattern}" if kind.pattern else ""
    return words + (" (one or more)" if option.is_list else "")


def _bounds(least: float | None, above: float | None, most: float | None, below: float | None, unit: str = "") -> str:
    if least is not None and most is not None:
        return f" between {least} and {most}{unit}"
    named = (("of at least", least), ("above", above), ("of at most", most), ("below", below))
    parts = [f"{words} {bound}{unit}" for words, bound in named if bound is not None]
    return " " + " and ".join(parts) if parts else ""
