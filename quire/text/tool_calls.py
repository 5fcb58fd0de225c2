"""Tool calls in a growing text. Owns the formats in which models write them, and the reader.

Formats are data: how a call is announced, what stands before its arguments, and what after them. The reader is an
automaton over them.
Invariants: a call begins only where its whole head fits and names a function that was offered, so a mark quoted in
prose, or JSON that breaks off before, stays text; from then on it is a call, also if it is cut; nothing but white space
around calls and their marks is lost; what is held back is bounded by the longest head; time is linear in the text.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Collection
from typing import Final, Protocol

from quire.text.borders import Borders
from quire.text.reasoning import MAX_SPACE, SPACE, partial

MAX_NAME: Final = 64
_NAME_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
MARK: Final = re.compile(r"<[|｜/]?[^<>\s]+[|｜]?>|\[[A-Z_]+\]")
"""A mark in the text of a format."""
_BRACKET = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


@enum.unique
class _Any(enum.Enum):
    """A step of a head that is not fixed text."""

    SPACE = "space"
    NAME = "name"


Steps = tuple[str | _Any, ...]
_S: Final = _Any.SPACE
_BEFORE_NAME: Final[Steps] = ("{", _S, '"name"', _S, ":", _S, '"')


def _object_head(key: str) -> Steps:
    """`{"name": "...", "key": ` before the arguments."""
    return (*_BEFORE_NAME, _Any.NAME, '"', _S, ",", _S, f'"{key}"', _S, ":", _S, "{")


_HEADS: Final = (_object_head("arguments"), _object_head("parameters"))


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    mark: str
    """The text that announces a call."""
    heads: tuple[Steps, ...]
    """What may stand between the mark and the arguments, up to their `{`."""
    ends: tuple[Steps, ...]
    """What may close a call, after which there is text again."""
    follows: tuple[Steps, ...] = ()
    """What may stand between a call's arguments and those of the next one."""
    needs_mark: bool = True
    """False: a text may also begin with a call."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in it that may be tokens of their own."""
        steps = [step for one in (*self.heads, *self.ends, *self.follows) for step in one if isinstance(step, str)]
        return (self.mark, *dict.fromkeys(mark for step in steps for mark in MARK.findall(step)))


HERMES: Final = ToolFormat(
    "<tool_call>",
    heads=tuple((_S, *head) for head in _HEADS),
    ends=((_S, "}", _S, "</tool_call>"), (_S, "</tool_call>")),
)
"""Hermes, Qwen and the bundled demo model."""
LLAMA3_JSON: Final = ToolFormat(
    "<|python_tag|>",
    heads=tuple((_S, *head) for head in _HEADS),
    ends=((_S, "}"),),
    follows=tuple((_S, "}", _S, *separator, _S, *head) for separator in ((";",), (",",), ()) for head in _HEADS),
    needs_mark=False,
)
"""Llama 3.1 and later: a bare JSON object at the start of the text, or one after the mark."""
MISTRAL: Final = ToolFormat(
    "[TOOL_CALLS]",
    heads=(
        *((_S, "[", _S, *head) for head in _HEADS),
        *((_S, *head) for head in _HEADS),
        (_S, _Any.NAME, _S, "{"),
        (_S, _Any.NAME, "[ARGS]", _S, "{"),
    ),
    ends=((_S, "}", _S, "]"), (_S, "}")),
    follows=tuple((_S, "}", _S, ",", _S, *head) for head in _HEADS),
)
"""Mistral's list of objects, and the newer name[ARGS]{...}, in which nothing closes a call."""
_DEEPSEEK_CALL: Final = "<｜tool▁call▁begin｜>"
_DEEPSEEK_END: Final = "<｜tool▁call▁end｜>"
_DEEPSEEK_ENDS: Final = "<｜tool▁calls▁end｜>"


def _deepseek(call: Steps, closing: Steps) -> ToolFormat:
    """A mark before all calls. call: from the mark of one to its arguments. closing: between these and its end."""
    return ToolFormat(
        "<｜tool▁calls▁begin｜>",
        heads=((_S, *call),),
        ends=((*closing, _DEEPSEEK_END, _S, _DEEPSEEK_ENDS), (*closing, _DEEPSEEK_END)),
        follows=((*closing, _DEEPSEEK_END, _S, *call),),
    )


DEEPSEEK_V3: Final = _deepseek(
    (_DEEPSEEK_CALL, "function<｜tool▁sep｜>", _Any.NAME, _S, "```json", _S, "{"), (_S, "```", _S)
)
"""DeepSeek V3 and R1: a block of code for the arguments."""
DEEPSEEK_V31: Final = _deepseek((_DEEPSEEK_CALL, _Any.NAME, "<｜tool▁sep｜>", _S, "{"), (_S,))
"""DeepSeek V3.1, without a block."""
FORMATS: Final = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
}
"""By vLLM's names."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of this function."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """More of its arguments."""

    text: str


Found = str | CallBegin | CallArguments


class ReadsCalls(Protocol):
    """Reads the text of one message."""

    def feed(self, text: str) -> list[Found]:
        """Text, beginnings of calls and their arguments, in order."""

    def finish(self) -> list[Found]:
        """What was held back, at the end of the text."""


class _Track:
    """One sequence of steps, matched character by character."""

    __slots__ = ("_at", "_count", "_name", "_steps")

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._at = 0
        self._count = 0
        self._name: list[str] = []

    @property
    def name(self) -> str:
        return "".join(self._name)

    def advance(self, char: str) -> bool | None:
        """True: the steps are complete; False: the text does not fit; None: it does so far."""
        while True:
            step = self._steps[self._at]
            if isinstance(step, str):
                if char != step[self._count]:
                    return False
                self._count += 1
                if self._count == len(step):
                    self._at, self._count = self._at + 1, 0
                return True if self._at == len(self._steps) else None
            if step is _Any.SPACE and char in SPACE and self._count < MAX_SPACE:
                self._count += 1
                return None
            if step is _Any.NAME:
                if char in _NAME_CHARS and self._count < MAX_NAME:
                    self._count += 1
                    self._name.append(char)
                    return None
                if not self._count:
                    return False
            self._at, self._count = self._at + 1, 0


class _Arguments:
    """Finds the end of a JSON object. Only strings and brackets are looked at."""

    __slots__ = ("_closers", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._closers = ["}"]
        self._in_string = False
        self._escaped = False

    def end(self, text: str, at: int) -> int:
        """Where the object ends in `text`, searched from `at` on; -1 if beyond it. A wrong bracket ends it before."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_STRING_END if self._in_string else _BRACKET).search(text, at)
            if found is None:
                return -1
            char, at = found.group(), found.end()
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
            elif char in "{[":
                self._closers.append("}" if char == "{" else "]")
            elif char != self._closers.pop():
                return found.start()
            elif not self._closers:
                return at
        return -1


class ToolReader:
    """Reads the text of one message. names: of the functions that were offered."""

    def __init__(self, style: ToolFormat, names: Collection[str]) -> None:
        self._style = style
        self._names = frozenset(names)
        self._held = ""
        """Text that may be part of a mark or head."""
        self._borders = Borders()
        self._tracks: list[_Track] = []
        self._n_tracked = 0
        """Characters of `_held` that the tracks have seen."""
        self._after: list[_Track] = []
        """Behind a call's arguments: the tracks of its end."""
        self._ended_at = 0
        """How much of `_held` belongs to the longest end that fits."""
        self._arguments: _Arguments | None = None
        self._found: list[Found] = []
        if not style.needs_mark:
            self._tracks = [_Track(head) for head in style.heads]
        self._n_mark = 0
        """Characters of `_held` that are text for certain if the tracks fail."""

    def feed(self, text: str) -> list[Found]:
        """Text, beginnings of calls and their arguments, in order."""
        self._held += text
        while self._held and self._step():
            pass
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Found]:
        """What was held back, at the end of the text."""
        if self._after:  # a cut end belongs to its call
            self._held = self._held[self._ended_at :] if self._ended_at else ""
        self._after, self._tracks, self._arguments = [], [], None
        self._text(self._held)
        rest = self._borders.finish()
        self._found += [rest] if rest else []
        found, self._found, self._held = self._found, [], ""
        return found

    def _step(self) -> bool:
        """Take some of what is held; False when it must grow first."""
        if self._arguments is not None:
            return self._read_arguments(self._arguments)
        if self._after:
            return self._read_end()
        if self._tracks:
            return self._read_head()
        return self._find_mark()

    def _find_mark(self) -> bool:
        mark = self._style.mark
        at = self._held.find(mark)
        if at < 0:
            cut = len(self._held) - partial(self._held, mark)
            self._text(self._held[:cut])
            self._held = self._held[cut:]
            return False
        self._text(self._held[:at])
        self._held = self._held[at:]
        self._n_mark = self._n_tracked = len(mark)
        self._tracks = [_Track(head) for head in self._style.heads]
        return True

    def _read_head(self) -> bool:
        done = self._advance(self._tracks)
        if done is not None and done.name in self._names:
            self._begin(done.name)
            return True
        if done is None and self._tracks:
            return False
        self._tracks = []
        cut, self._n_mark, self._n_tracked = self._n_mark, 0, 0
        if cut:
            self._text(self._held[:cut])
            self._held = self._held[cut:]
        return True

    def _begin(self, name: str) -> None:
        """The head is complete: what is held behind it are arguments."""
        self._borders.call()
        self._found += [CallBegin(name), CallArguments("{")]
        self._held = self._held[self._n_tracked :]
        self._tracks, self._after, self._n_tracked, self._n_mark = [], [], 0, 0
        self._arguments = _Arguments()

    def _read_arguments(self, arguments: _Arguments) -> bool:
        end = arguments.end(self._held, 0)
        text = self._held if end < 0 else self._held[:end]
        if text:
            self._found.append(CallArguments(text))
        self._held = self._held[len(text) :]
        if end >= 0:
            self._arguments = None
            self._n_tracked = 0
            self._after = [_Track(steps) for steps in (*self._style.ends, *self._style.follows)]
            self._ended_at = 0
        return bool(self._held)

    def _read_end(self) -> bool:
        """Behind a call's arguments: its end, or the head of the next call, whichever fits longest."""
        while self._n_tracked < len(self._held):
            char = self._held[self._n_tracked]
            self._n_tracked += 1
            alive = []
            for track in self._after:
                state = track.advance(char)
                if state is None:
                    alive.append(track)
                elif state and track.name:
                    if track.name in self._names:
                        self._begin(track.name)
                        return True
                elif state:
                    self._ended_at = self._n_tracked
            self._after = alive
            if not alive:
                self._held = self._held[self._ended_at :]
                self._n_tracked = 0
                return True
        return False

    def _advance(self, tracks: list[_Track]) -> _Track | None:
        """Show the tracks what they have not seen; the first that is complete. Those that fail are removed."""
        while tracks and self._n_tracked < len(self._held):
            char = self._held[self._n_tracked]
            self._n_tracked += 1
            alive = []
            for track in tracks:
                state = track.advance(char)
                if state:
                    return track
                if state is None:
                    alive.append(track)
            tracks[:] = alive
        return None

    def _text(self, text: str) -> None:
        text = self._borders.text(text)
        if text:
            self._found.append(text)
