"""Command-line flags made from an options struct: spelling, help, value checks, and docs/options.md.

Owns how a field becomes a flag. Does not own the options (`config/engine.py`, ...) nor the commands (`cli/`).
Invariants: a flag that was not given leaves the struct's own default; a bad value or an unknown flag exits with 2
and names the flag, the value, the limit, or the nearest flag; nothing is abbreviated.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import msgspec
from msgspec import inspect

from quire.config.command_line import dashed, spelled, translate, with_config_file
from quire.config.foreign import SHORT_FLAGS, suggestion
from quire.config.options import Option, Options, describe, limit, make_options
from quire.core.errors import ConfigError, QuireError, shown
from quire.core.spelling import did_you_mean

_NO_NUMBER = re.compile(r"argument (.+?): invalid (int|float) value: (.+)", re.DOTALL)
_NO_CHOICE = re.compile(r"argument (.+?): invalid choice: (.+) \(choose from (.+)\)", re.DOTALL)
_FLAG = re.compile(r"--[\w-]+")

Converter = Callable[[str], object]


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest flag, never abbreviates, and keeps an error to two lines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.knows_others = False
        """Whether --config and the flags of vLLM and llama.cpp mean something here (`config/foreign.py`)."""
        self.where = ""
        """What errors begin with, where the words are the value of another flag."""
        self.elsewhere: dict[str, str] = {}
        """Flags of other commands → what says the same here."""
        self._modes: dict[str, FlagParser] = {}
        self._written: dict[str, str] = {}
        """Our flag → the other name by which it was given, which an error names."""
        self._places: dict[str, str] = {}
        """Flag → where in the file of options it stands, which an error names too."""

    def add_mode(self, name: str, description: str) -> FlagParser:
        """The parser of what follows `name` in the first place, where any other first word is this parser's."""
        self._modes[name] = FlagParser(prog=f"{self.prog} {name}", description=description)
        return self._modes[name]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but what is not known is an error here, where the nearest flag can be named."""
        given = list(sys.argv[1:] if args is None else args)
        if given and given[0] in self._modes:
            return self._modes[given[0]].parse_known_args(given[1:], namespace)
        try:
            words = self._translated(given)
        except ConfigError as error:
            self.error(error.message)
        known, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._explain_unknown(unknown))
        return known, unknown

    def _translated(self, words: list[str]) -> list[str]:
        flags = self._option_string_actions
        if not self.knows_others:
            return [_respelled(word, flags) for word in words]
        words, model, self._places = with_config_file(words, flags)
        if model:
            self.set_defaults(config_model=model)
        given = [word.partition("=")[0] for word in words]
        self._written = {spelled(flag, flags): flag for flag in given if flag.replace("_", "-") not in flags}
        return translate(words, flags)

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is; exit with 2."""
        for flag, written in self._written.items():
            message = message.replace(f"argument {flag}:", f"argument {written} ({flag}):")
        message = self.where + self.placed(_plainly(message))
        self.exit(2, f"{self.prog}: error: {message}\nSee: {self.prog} --help\n")

    def placed(self, message: str) -> str:
        """An error, with the place of the flag that it is about if that is in a file of options."""
        flag = _FLAG.search(message)
        place = self._places.get(flag[0]) if flag is not None else None
        return f"{place}: {message}" if place else message

    def _print_message(self, message: str, file: Any = None) -> None:
        """As in argparse, which hides that the file is full."""
        if message:
            (file or sys.stderr).write(message)

    def _explain_unknown(self, unknown: Sequence[str]) -> str:
        flags = [text.split("=", 1)[0] for text in unknown if text.startswith("-")]
        if not flags:
            return f"unexpected argument {shown(unknown[0])}"
        spelling, known = flags[0].replace("_", "-"), self._option_string_actions
        if spelling in self.elsewhere:
            return f"unknown option {flags[0]}: here it is {self.elsewhere[spelling]}"
        hint = suggestion(spelling, known, dashed) if self.knows_others else did_you_mean(spelling, known)
        return f"unknown option {flags[0]}{hint}"


def _plainly(message: str) -> str:
    """What argparse says of a wrong value, in the words of the other messages."""
    found = _NO_NUMBER.fullmatch(message)
    if found is not None:
        return f"{found[1]} = {found[3]} must be a {'whole ' if found[2] == 'int' else ''}number"
    found = _NO_CHOICE.fullmatch(message)
    if found is None:
        return message
    known = [word.strip("' ") for word in found[3].split(",")]
    return f"{found[1]} = {found[2]} is not one of {', '.join(known)}{did_you_mean(found[2].strip(chr(39)), known)}"


def _respelled(word: str, flags: Collection[str]) -> str:
    flag, has_value, value = word.partition("=")
    new = spelled(flag, flags)
    return new + has_value + value if new in flags else word


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


def options_list(options: type[msgspec.Struct]) -> str:
    """A Markdown list of the flags of `options`, in lines of at most 120 characters: flag, values, default, meaning."""
    items = []
    for option in describe(options):
        names = [option.flag, *([f"--no-{option.flag[2:]}"] if option.is_switch else []), *_short(option)]
        flag = ", ".join(f"`{name}`" for name in names)
        text = f"- {flag} ({limit(option)}; default {option.default_text}): {option.meaning}"
        items.append(textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(items)


def in_flags(error: QuireError, *options: type[msgspec.Struct]) -> QuireError:
    """An error that names fields of `options`, as keyword arguments of Python have them, with the flags in their place:
    what was typed is found again. Others are given back as they are; fields of a config.json are none of these."""
    names = [name for each in options for name in each.__struct_fields__]
    begins = re.match(r"[a-z]\w*(?= = | and )", error.message)
    if not isinstance(error, ConfigError) or error.message.startswith("config.json"):
        return error
    if begins is None or begins[0] not in names:  # a word is a field only if it looks like one
        names = [name for name in names if "_" in name] if error.param in names else []

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2] or ""
        if name not in names or not ("_" in name or value):
            return found[0]
        no = "no_" if value == " = False" else ""
        rest = "" if value in (" = True", " = False") else value.replace(" = ", " ")
        return dashed(no + name) + rest

    message = re.sub(r"(?<![\w.'\"/-])([a-z]\w*)\b(?!['\"/(.\w])( = (?:True\b|False\b)?)?", flag, error.message)
    return ConfigError(message, param=error.param, code=error.code)


def _short(option: Option) -> list[str]:
    """Short forms of its flag."""
    return [short for short, name in SHORT_FLAGS.items() if name == option.name]


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    also = "".join(f"also {short}; " for short in _short(option))
    text = f"{option.meaning} ({also}default: {option.default_text})".replace("%", "%%")
    common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
    if option.is_switch:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    else:
        if option.is_list:
            common |= {"nargs": "+", "action": _Items}
        group.add_argument(option.flag, type=_converter(option), metavar=_metavar(option), **common)


class _Items(argparse.Action):
    """Keeps one list of all words, of which one may be a list by itself."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        items = [item for value in values for item in (value if isinstance(value, list) else [value])]
        setattr(namespace, self.dest, items)


def named(text: str) -> str:
    """Type of an argument that names a file or a folder: an empty one, as of a shell variable that is not set, would
    mean the current folder, or none. ArgumentTypeError."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{shown(text)} is empty: give a name")
    return text


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(str(choice) for choice in option.choices) + "}"
    return {inspect.IntType: "N", inspect.FloatType: "X", inspect.DictType: "JSON"}.get(type(option.item_kind), "TEXT")


def _converter(option: Option) -> Converter:
    """A function from the command line's text to a checked value; its error says value, limit and nearest choice."""

    def convert(text: str) -> object:
        try:
            value = option.read_word(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if isinstance(value, str) and not value.strip():
            # A shell variable that is not set must not mean that there is no key file.
            raise argparse.ArgumentTypeError(f"{shown(text)} is empty: give a value, or leave {option.flag} out")
        return value

    return convert
