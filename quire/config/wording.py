"""Messages in the words of who reads them: a flag of the command line is a keyword argument in Python.

Messages are written with flags, as most are read in a terminal; `in_python` is around what Python code calls.
Does not own what flags mean (`config/options`). Invariant: code in backticks and quoted values stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec import inspect

from quire.config.options import Option, describe
from quire.core.errors import ConfigError, LoadError

_FLAG: Final = re.compile(
    r"""(?P<code>`[^`]*`)|(?<![\w/'"-])--(?P<off>no-)?(?P<name>[a-z][a-z0-9-]*[a-z0-9])(?P<value> '[^']*'| [\w.]+)?"""
)
_PLACEHOLDER: Final = re.compile(r"[A-Z]+")
"""FILE in `--chat-template FILE`."""


@contextlib.contextmanager
def in_python(options: type[msgspec.Struct]) -> Iterator[None]:
    """Errors from inside name keyword arguments. options: what is called has these as keywords."""
    try:
        yield
    except (ConfigError, LoadError) as error:
        message = keywords_for_flags(error.message, {option.name: option for option in describe(options)})
        if message == error.message:
            raise
        reworded = type(error)(message, param=error.param, code=error.code)
        raise reworded.with_traceback(error.__traceback__) from None


def keywords_for_flags(message: str, options: Mapping[str, Option]) -> str:
    """`message` with `max_model_len=2048` for `--max-model-len 2048`; a flag that is no option is one of the server."""

    def replaced(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        value = match["value"] or ""
        option = options.get(match["name"].replace("-", "_"))
        if option is None:
            return f"`quire serve` {match[0]}"
        if option.is_switch:
            return f"{option.name}={not match['off']}{value}"
        written = _python_value(option, value.strip())
        return f"{option.name}={written}" if written else f"{option.name}{value}"

    return _FLAG.sub(replaced, message)


def _python_value(option: Option, text: str) -> str:
    """The source of a value after a flag; empty for a word that goes on with the sentence."""
    if not text or _PLACEHOLDER.fullmatch(text):
        return text
    if isinstance(option.item_kind, inspect.DictType):
        try:
            return repr(json.loads(text.strip("'")))
        except ValueError:
            return ""
    if isinstance(option.item_kind, inspect.StrType):
        return repr(text) if text[0].isdigit() else ""
    try:
        return repr(option.read(text))
    except ValueError:
        return ""
