"""A model's reasoning before its answer: `<think>...</think>`. Owns where it begins and ends in a growing text.

Invariants: the two texts that come out do not depend on how the text was cut; at most `MAX_SPACE` characters and a part
of a mark are held back. White space around the marks is dropped.
"""

from __future__ import annotations

import enum
from typing import Final

BEGIN: Final = "<think>"
END: Final = "</think>"
SPACE: Final = " \t\r\n"
MAX_SPACE: Final = 64


@enum.unique
class _State(enum.Enum):
    START = "start"
    """Nothing but white space has come."""
    INSIDE_START = "inside_start"
    INSIDE = "inside"
    AFTER_START = "after_start"
    AFTER = "after"


class ReasoningReader:
    """Splits one text. `inside`: the prompt ended with `BEGIN`, so that the text begins with reasoning.

    Otherwise there is reasoning only if the text begins with `BEGIN`.
    """

    def __init__(self, inside: bool) -> None:
        self._state = _State.INSIDE_START if inside else _State.START
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that this text completes."""
        if self._in(_State.AFTER):
            return "", text
        self._held += text
        reasoning = ""
        if self._in(_State.START):
            self._open()
        if self._in(_State.INSIDE_START):
            self._skip_space(_State.INSIDE)
        if self._in(_State.INSIDE):
            reasoning = self._read_inside()
        if self._in(_State.AFTER_START):
            self._skip_space(_State.AFTER)
        if not self._in(_State.AFTER):
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        if self._state is _State.INSIDE:
            return held, ""
        return "", held if self._state is _State.START else ""

    def _in(self, state: _State) -> bool:
        return self._state is state

    def _open(self) -> None:
        """Look for `BEGIN`; the state stays START while it may still come."""
        stripped = self._held.lstrip(SPACE)
        n_spaces = len(self._held) - len(stripped)
        if n_spaces > MAX_SPACE or not (stripped.startswith(BEGIN) or BEGIN.startswith(stripped)):
            self._state = _State.AFTER
        elif stripped.startswith(BEGIN):
            self._held = stripped[len(BEGIN) :]
            self._state = _State.INSIDE_START

    def _skip_space(self, then: _State) -> None:
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = then

    def _read_inside(self) -> str:
        end = self._held.find(END)
        if end >= 0:
            reasoning, self._held = self._held[:end], self._held[end + len(END) :]
            self._state = _State.AFTER_START
            return reasoning
        n_held = partial(self._held, END)
        cut = len(self._held) - n_held
        reasoning, self._held = self._held[:cut], self._held[cut:]
        return reasoning


def partial(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with, short of all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
