"""Text that knows where each of its characters comes from.

A chat template joins its own marks with what a request says. A `TracedText` is a str in every respect (value, equality,
hash, order) whose methods keep the `Origin` of each character, so that marks can be taken from the template alone.
Owns strings and their methods. Does not own what else a template does with them (`text/sandbox`) nor which marks there
are (`text/marks`). Invariant: a character that may come from a request never counts as the template's. Where the way of
a character cannot be followed, it has all origins of what the result was made of.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, SupportsIndex

import jinja2
from markupsafe import Markup

_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"}
_ESCAPED = re.compile("[&<>'\"]")
_STAND_IN = re.compile("\ue000(\\d+)\ue001")


@enum.unique
class Origin(enum.IntFlag):
    """Who wrote a character; several where it was one of them."""

    TEMPLATE = 1
    MODEL = 2
    """In an earlier turn of the assistant, as the request tells it."""
    REQUEST = 4


ANYBODY: Final = Origin.TEMPLATE | Origin.MODEL | Origin.REQUEST
MIXTURES: Final = bytes((3, 5, 6, 7))


def _cased(change: Callable[[str], str]) -> Any:
    def method(self: TracedText) -> TracedText:
        text = change(self)
        return TracedText(text, self._origins if len(text) == len(self) else blend(self))

    return method


def _padded(pad: Callable[..., str]) -> Any:
    return lambda self, *args, **kwargs: TracedText(pad(self, *args, **kwargs), blend([self, args, kwargs]))


class TracedText(str):
    """A str with the origin of each character. `origins`: one byte a character, or one origin for all."""

    __slots__ = ("_origins", "said")
    _origins: bytes
    said: dict[Origin, list[str]]
    """Of a whole prompt: the texts of each origin that went into it; empty if each character has one origin."""

    capitalize, casefold, lower = _cased(str.capitalize), _cased(str.casefold), _cased(str.lower)
    swapcase, title, upper = _cased(str.swapcase), _cased(str.title), _cased(str.upper)
    center, ljust, rjust = _padded(str.center), _padded(str.ljust), _padded(str.rjust)
    expandtabs, zfill = _padded(str.expandtabs), _padded(str.zfill)

    def __new__(cls, text: str, origins: bytes | Origin) -> TracedText:
        made = super().__new__(cls, text)
        made._origins = bytes((origins,)) * len(text) if isinstance(origins, Origin) else origins
        made.said = {}
        return made

    def __str__(self) -> TracedText:
        return self

    def __iter__(self) -> Iterator[TracedText]:
        for at in range(len(self)):
            yield self[at]

    def __getitem__(self, key: SupportsIndex | slice) -> TracedText:
        text = super().__getitem__(key)
        part = self._origins[key]
        return TracedText(text, bytes((part,)) if isinstance(part, int) else part)

    def __add__(self, other: str) -> TracedText | TracedMarkup:
        if not isinstance(other, str):
            return NotImplemented
        if isinstance(other, Markup):
            return escaped(self) + other
        return TracedText(super().__add__(other), self._origins + origins_of(other))

    def __radd__(self, other: str) -> TracedText | TracedMarkup:
        if not isinstance(other, str):
            return NotImplemented
        return TracedText(str.__add__(other, self), origins_of(other) + self._origins)

    def __mul__(self, count: SupportsIndex) -> TracedText:
        return TracedText(super().__mul__(count), self._origins * count)

    __rmul__ = __mul__

    def __mod__(self, given: Any) -> str:
        return filled(self, given)

    def __rmod__(self, form: str) -> str:
        return filled(form, self)

    def __format__(self, spec: str) -> TracedText:
        return TracedText(format(plain(self), spec), blend(self))

    def __repr__(self) -> TracedText:
        return TracedText(super().__repr__(), blend(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(super().splitlines(keepends), None)

    def partition(self, sep: str) -> tuple[str, str, str]:
        return tuple(self._located(super().partition(sep), ""))  # type: ignore[return-value]

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return tuple(self._located(super().rpartition(sep), ""))  # type: ignore[return-value]

    def strip(self, chars: str | None = None) -> TracedText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> TracedText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> TracedText:
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str) -> TracedText:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> TracedText:
        return self[: len(super().removesuffix(suffix))]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TracedText:
        if not old:
            return TracedText(super().replace(old, new, count), blend([self, new]))
        return TracedText(new, origins_of(new)).join(self.split(old, count))

    def join(self, parts: Iterable[str]) -> TracedText:
        parts = list(parts)
        return TracedText(super().join(parts), self._origins.join(map(origins_of, parts)))

    def format(self, *args: Any, **kwargs: Any) -> TracedText:
        return TracedText(plain(self).format(*args, **kwargs), blend([self, args, kwargs]))

    def format_map(self, mapping: Any) -> TracedText:
        return TracedText(plain(self).format_map(mapping), blend([self, mapping]))

    def translate(self, table: Any) -> TracedText:
        return TracedText(super().translate(table), ANYBODY)

    def _located(self, pieces: Sequence[str], sep: str | None) -> list[str]:
        """Pieces that stand one after another in this text, with `sep` between them; None: white space."""
        found: list[str] = []
        at = 0
        for piece in pieces:
            if sep is None:
                at = self.find(piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return found


class TracedMarkup(Markup):
    """What `| safe` and `| escape` make of a text: Jinja's escaped text, whose methods escape what they add."""

    __slots__ = ("_origins",)
    _origins: bytes

    def __new__(
        cls, text: Any = "", origins: bytes | Origin | None = None, errors: str = "strict"
    ) -> TracedMarkup:  # Markup's own methods pass the text alone
        made = super().__new__(cls, text)
        if isinstance(origins, bytes):
            made._origins = origins
        else:
            made._origins = bytes((ANYBODY if origins is None else origins,)) * len(made)
        return made

    def __add__(self, other: Any) -> TracedMarkup:
        if not isinstance(other, str):
            return NotImplemented
        more = escaped(other)
        return TracedMarkup(plain(self) + plain(more), self._origins + more._origins)

    def __radd__(self, other: Any) -> TracedMarkup:
        return escaped(other) + self if isinstance(other, str) else NotImplemented

    def __str__(self) -> TracedText:
        return TracedText(plain(self), self._origins)

    def __iter__(self) -> Iterator[TracedText]:
        return iter(TracedText(plain(self), self._origins))


def plain(text: str) -> str:
    """The value alone, as an exact str."""
    return str.__str__(text)


def is_traced(value: Any) -> bool:
    """A text with origins of its own."""
    return isinstance(value, (TracedText, TracedMarkup))


def origins_of(text: str) -> bytes:
    """One byte a character. A str that is not traced is the template's, but escaped text is always made traced."""
    if isinstance(text, (TracedText, TracedMarkup)):
        return text._origins
    return bytes((ANYBODY if isinstance(text, Markup) else Origin.TEMPLATE,)) * len(text)


def as_text(value: Any) -> str:
    """`str(value)` with its origins."""
    if type(value) is str or isinstance(value, TracedText):
        return value
    if isinstance(value, str):
        return TracedText(plain(value), origins_of(value))
    return str(derived(str(value), value))


def escaped(text: str) -> TracedMarkup:
    """`markupsafe.escape`: escaped text stays as it is."""
    bare, origins = plain(text), origins_of(text)
    if isinstance(text, Markup):
        return TracedMarkup(bare, origins)
    kept, at = [], 0
    for found in _ESCAPED.finditer(bare):
        kept += [origins[at : found.start()], origins[found.start() : found.end()] * len(_ESCAPES[found.group()])]
        at = found.end()
    return TracedMarkup(Markup.escape(bare), b"".join([*kept, origins[at:]]))


def blend(value: Any) -> Origin:
    """The origins of a text that is made of all texts in a value, somehow. O(size), no recursion."""
    found, pending = Origin(0), [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            origins = origins_of(item)
            for origin in range(1, ANYBODY + 1):
                if origin in origins:
                    found |= Origin(origin)
        elif isinstance(item, dict):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            pending += item
        elif not isinstance(item, (int, float, range, jinja2.Undefined, type(None))):
            return ANYBODY  # a view, a namespace: nobody looks inside
    return found or Origin.TEMPLATE


def texts_of(value: Any, origin: Origin) -> list[str]:
    """All texts in a value of which some character has this origin, as plain values."""
    found, pending = [], [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if origin in origins_of(item):
                found.append(plain(item))
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
    return found


def traced(value: Any, origin: Origin) -> Any:
    """A copy of a JSON value in which every string, keys included, has this origin."""
    if isinstance(value, str):
        return TracedText(value, origin)
    if isinstance(value, dict):
        return {traced(key, origin): traced(item, origin) for key, item in value.items()}
    return [traced(item, origin) for item in value] if isinstance(value, list) else value


def joined(parts: Iterable[str]) -> str:
    """`"".join(parts)`, traced if one of them is."""
    parts = list(parts)
    text = "".join(parts)
    return text if all(type(part) is str for part in parts) else TracedText(text, b"".join(map(origins_of, parts)))


def derived(result: Any, sources: Any) -> Any:
    """A value that was computed from `sources` by means that trace nothing: its texts are a blend of theirs."""
    if isinstance(result, list):
        return [derived(item, sources) for item in result]
    if isinstance(result, tuple):
        return tuple(derived(item, sources) for item in result)
    if not isinstance(result, str):
        return result
    origin = blend(sources)
    if isinstance(result, Markup):
        return TracedMarkup(plain(result), origin)
    return result if origin == Origin.TEMPLATE else TracedText(plain(result), origin)


def formatted(make: Callable[[list[Any]], str], form: Any, values: list[Any]) -> str:
    """`make(values)`, with each traced value followed to its place in the result if it stands there as it is.

    make: fills a form, whose own origin is that of `form`, with values.
    """
    result = make([plain(value) if isinstance(value, str) else value for value in values])
    known = {str(i): value for i, value in enumerate(values) if isinstance(value, TracedText)}
    others = [value for i, value in enumerate(values) if str(i) not in known]
    if blend([form, others]) == Origin.TEMPLATE:
        with contextlib.suppress(TypeError, ValueError):  # a field that takes no stand-in, as %c
            text = make([f"\ue000{i}\ue001" if str(i) in known else value for i, value in enumerate(values)])
            found = joined(known.get(part, part) if i % 2 else part for i, part in enumerate(_STAND_IN.split(text)))
            if found == result:
                return found
    return TracedText(result, blend([form, values]))


def filled(form: str, given: Any) -> str:
    """`form % given`."""
    if isinstance(given, dict):
        return formatted(lambda values: plain(form) % dict(zip(given, values, strict=True)), form, list(given.values()))
    if isinstance(given, tuple):
        return formatted(lambda values: plain(form) % tuple(values), form, list(given))
    return formatted(lambda values: plain(form) % values[0], form, [given])
