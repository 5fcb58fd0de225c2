"""Tool calls whose arguments are tags around bare text. Owns these formats, and their reader.

Formats are data, as those of `tool_calls.py`. Does not own which JSON a text is (`xml_values.py`).
Invariants: those of `tool_calls.py`; and a tag that closes an argument does so only where another one or the end of the
call follows, so that the same tag may be quoted in the text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Final

from quire.text.borders import Borders
from quire.text.cursor import Cursor, Unfinished
from quire.text.reasoning import SPACE, partial
from quire.text.tool_calls import MARK, MAX_NAME, CallArguments, CallBegin, Found
from quire.text.xml_values import JsonObject, ValueWriter, types_of

MAX_KEY: Final = 256
_CUT: Final = "</t"
"""Of a last tag at the end of the text: less is none where the call had no mark."""
_KEY = re.compile(rf'[^<>"\n]{{1,{MAX_KEY + 1}}}')


@functools.cache
def _opener(openers: tuple[str, ...]) -> re.Pattern[str]:
    """Finds one of these texts, or at the end what may become one. All begin with the same character."""
    parts = {opener[1:end] for opener in openers for end in range(1, len(opener))}
    wholes, cut = (sorted(map(re.escape, some), reverse=True) for some in ({one[1:] for one in openers}, parts))
    return re.compile(rf"{re.escape(openers[0][0])}(?:{'|'.join(wholes)}|(?:{'|'.join(cut)})\Z)")


def is_key(name: str) -> bool:
    """Whether an argument can be called so."""
    return len(name) <= MAX_KEY and name == name.strip() and _KEY.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class XmlFormat:
    """How a model writes calls. White space may stand between the tags."""

    mark: str
    """The text that announces a call."""
    begin: str
    """From the mark to the name."""
    named: str
    """Behind the name."""
    key: str
    """Before the name of an argument."""
    value: tuple[str, ...]
    """Between it and its value: tags, with white space between them."""
    end: str
    """Behind the value."""
    closes: tuple[str, ...]
    """What ends a call; one of several will do."""
    group_end: str = ""
    """Closes a series of calls that a mark has begun."""
    trims: bool = True
    """A line end at each side of a value belongs to the tags."""
    may_lack_mark: bool = False
    """A call may also begin with `begin`: models forget the mark."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Texts with which a call may begin."""
        return (self.mark, self.begin) if self.may_lack_mark else (self.mark,)

    @property
    def marks(self) -> tuple[str, ...]:
        """Tags that may be tokens of their own."""
        tags = (self.mark, self.key, *self.value, self.end, *self.closes, self.group_end)
        return tuple(tag for tag in tags if MARK.fullmatch(tag))


GLM45: Final = XmlFormat(
    "<tool_call>", begin="", named="", key="<arg_key>", value=("</arg_key>", "<arg_value>"), end="</arg_value>",
    closes=("</tool_call>",), trims=False,
)  # fmt: skip
QWEN3_CODER: Final = XmlFormat(
    "<tool_call>", begin="<function=", named=">", key="<parameter=", value=(">",), end="</parameter>",
    closes=("</function>", "</tool_call>"), may_lack_mark=True,
)  # fmt: skip
MINIMAX_M2: Final = XmlFormat(
    "<minimax:tool_call>", begin='<invoke name="', named='">', key='<parameter name="', value=('">',),
    end="</parameter>", closes=("</invoke>",), group_end="</minimax:tool_call>",
)  # fmt: skip
XML_FORMATS: Final = {"glm45": GLM45, "qwen3_coder": QWEN3_CODER, "minimax_m2": MINIMAX_M2}
"""By vLLM's names."""


class XmlReader:
    """Reads the text of one message. functions: the schemas of those that were offered, by name."""

    def __init__(self, style: XmlFormat, functions: Mapping[str, JsonObject]) -> None:
        self._style = style
        self._functions = functions
        self._opener = _opener(style.openers)
        self._held = ""
        """Text that may be part of a tag."""
        self._is_over = False
        """Nothing more is fed."""
        self._borders = Borders()
        self._schema: JsonObject = {}
        """Of the newest call."""
        self._value: ValueWriter | None = None
        """Of the argument that is open."""
        self._n_arguments = 0
        self._in_group = False
        """Behind a call in a series."""
        self._has_mark = False
        """The newest call began with the mark."""
        self._found: list[Found] = []

    def feed(self, text: str) -> list[Found]:
        """Text, beginnings of calls and their arguments, in order."""
        self._held += text
        self._held = self._held[self._read(self._held) :]
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Found]:
        """What was held back, at the end of the text."""
        self._is_over = True
        held, self._held = self._held[self._read(self._held) :], ""
        if self._value is not None:
            self._end_cut(self._value, held)
        elif not (self._in_group and self._style.group_end.startswith(held.lstrip(SPACE))):  # a cut end says nothing
            self._text(held)
        rest = self._borders.finish()
        self._found += [rest] if rest else []
        found, self._found = self._found, []
        return found

    def _read(self, text: str) -> int:
        """How much of the text is read."""
        at = 0
        while True:
            try:
                if self._value is not None:
                    at = self._read_value(self._value, text, at)
                elif self._in_group:
                    at = self._read_group(text, at)
                else:
                    at = self._read_text(text, at)
            except _Held as held:
                return held.at

    def _read_text(self, text: str, at: int) -> int:
        found = self._opener.search(text, at)
        if found is None:
            self._text(text[at:])
            raise _Held(len(text))
        begin, end, opener = found.start(), found.end(), found.group()
        self._text(text[at:begin])
        if opener not in self._style.openers:
            raise _Held(begin)
        self._has_mark = opener == self._style.mark
        cursor = Cursor(text, end if self._has_mark else begin)
        if self._begins(cursor, begin):
            return cursor.at
        self._text(opener)
        return end

    def _read_group(self, text: str, at: int) -> int:
        """Behind a call in a series: another one, or its end."""
        cursor = Cursor(text, at)
        if self._begins(cursor, at):
            return cursor.at
        self._in_group = False
        cursor = Cursor(text, at)
        cursor.space()
        try:
            return cursor.at if cursor.takes(self._style.group_end) else at
        except Unfinished:
            self._in_group = True
            raise _Held(at) from None

    def _begins(self, cursor: Cursor, held_at: int) -> bool:
        """Take a call's head, up to its first value or its end, if one stands here."""
        style = self._style
        try:
            cursor.space()
            if style.begin and not cursor.takes(style.begin):
                return False
            name = cursor.word()
            if name not in self._functions or len(name) > MAX_NAME or (style.named and not cursor.takes(style.named)):
                return False
            key = self._next(cursor)
        except Unfinished:
            raise _Held(held_at) from None
        if key is None:
            return False
        self._borders.call()
        self._in_group = False
        self._schema, self._n_arguments = self._functions[name], 0
        self._found += [CallBegin(name), CallArguments("{")]
        self._go_on(key)
        return True

    def _next(self, cursor: Cursor) -> str | None:
        """Take what follows a head or an argument: the name of the next argument, "" at the end; None: neither."""
        style = self._style
        cursor.space()
        if cursor.takes(style.key):
            key = cursor.match(_KEY, MAX_KEY)
            for tag in style.value:
                if not key or not cursor.takes(tag):
                    return None
                if tag is not style.value[-1]:
                    cursor.space()
            return key.strip() or None
        return "" if self._closes(cursor) else None

    def _closes(self, cursor: Cursor) -> bool:
        """Take the end of a call. One tag of several will do."""
        found = False
        for tag in self._style.closes:
            before = cursor.at
            if found:
                cursor.space()
            try:
                takes = cursor.takes(tag)
            except Unfinished:
                if not (found and self._is_over):
                    raise
                takes = self._has_mark or len(cursor.text) - cursor.at >= len(_CUT)
                cursor.at = len(cursor.text)
            found |= takes
            if not takes:
                cursor.at = before
        return found

    def _go_on(self, key: str) -> None:
        """Begin an argument, or end the call."""
        if not key:
            self._value = None
            self._in_group = bool(self._style.group_end)
            self._found.append(CallArguments("}"))
            return
        separator = ", " if self._n_arguments else ""
        self._n_arguments += 1
        self._found.append(CallArguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: "))
        self._value = ValueWriter(types_of(self._schema, key), trims=self._style.trims)

    def _read_value(self, value: ValueWriter, text: str, at: int) -> int:
        end = self._style.end
        found = text.find(end, at)
        if found < 0:
            cut = len(text) - partial(text[at:][-len(end) :], end)
            self._arguments(value.feed(text[at:cut]))
            raise _Held(cut)
        self._arguments(value.feed(text[at:found]))
        cursor = Cursor(text, found + len(end))
        try:
            key = self._next(cursor)
        except Unfinished:
            raise _Held(found) from None
        if key is None:
            self._arguments(value.feed(end))
            return found + len(end)
        self._arguments(value.finish())
        self._go_on(key)
        return cursor.at

    def _end_cut(self, value: ValueWriter, held: str) -> None:
        """The text ends in an argument, perhaps in the tag behind it, or further behind."""
        self._arguments(value.finish() if held.startswith(self._style.end) else value.cut())

    def _arguments(self, text: str) -> None:
        if text:
            self._found.append(CallArguments(text))

    def _text(self, text: str) -> None:
        text = self._borders.text(text)
        if text:
            self._found.append(text)


class _Held(Exception):
    """The text must grow first."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at
        """What is read of it."""
