"""OpenAI's Harmony format, in which gpt-oss answers: a series of messages, each with a head. Owns heads and the reader.

A head says the message's channel, and to whom it goes: `<|channel|>commentary to=functions.NAME <|constrain|>json
<|message|>`. The prompt ends behind `<|start|>assistant`, so that the first head lacks it.
Invariants: the pieces do not depend on how the text was cut; a message begins only where its whole head fits, so marks
that are quoted stay text; what goes to somebody who was not offered stays content, head and all; what is held back is
bounded by the longest head; time is linear in the text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Final

from quire.text.cursor import Cursor, Unfinished
from quire.text.message import MessageReader, Piece, PieceKind
from quire.text.reasoning import partial

TOOLS: Final = "openai"
"""vLLM's names of the format, for calls and for reasoning."""
REASONING: Final = "openai_gptoss"
START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
TURN_ENDS: Final = ("<|return|>", "<|call|>")
ENDS: Final = (END, *TURN_ENDS)
"""What closes a message."""
ROLE: Final = "assistant"
FUNCTIONS: Final = "functions."
"""Before the name of a function that a message goes to."""
_TO: Final = "to="
_ANALYSIS: Final = "analysis"
_FINAL: Final = "final"
_CHANNELS: Final = (_ANALYSIS, "commentary", _FINAL)
_BEGINNINGS: Final = (*ENDS, START, CHANNEL)
"""What may stand first in a head behind a message."""
_BEGINNING = re.compile("|".join(map(re.escape, _BEGINNINGS)))


def is_harmony(sources: Iterable[str]) -> bool:
    """Whether one of a model's chat templates writes this format."""
    return any(CHANNEL in source and START in source and MESSAGE in source for source in sources)


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What a message says of itself."""

    channel: str
    """One of the three, or empty."""
    recipient: str
    """To whom it goes; empty: to the user, or to nobody."""
    start: int
    """Where it begins in the text, behind what closed the message before it."""
    end: int

    @property
    def is_reasoning(self) -> bool:
        """The model speaks to itself."""
        return self.channel == _ANALYSIS and not self.recipient


def head_at(text: str, at: int, *, is_first: bool) -> Head | None:
    """The head that stands here, None if none does. Unfinished while it may still become one.

    is_first: nothing but the role stands before it, and that is in the prompt.
    """
    cursor = Cursor(text, at)
    if not is_first:
        any(cursor.takes(mark) for mark in ENDS)
    start = cursor.at
    cursor.space()
    has_role = cursor.takes(START)
    if has_role and not cursor.takes(ROLE):
        return None
    cursor.space()
    recipient = channel = ""
    if has_role or is_first:
        recipient = _recipient(cursor)
    if cursor.takes(CHANNEL):
        cursor.space()
        channel = cursor.word()
        if channel not in _CHANNELS:
            return None
        cursor.space()
        recipient = recipient or _recipient(cursor)
    if not (has_role or channel or recipient):
        return None
    if cursor.takes(CONSTRAIN):
        cursor.space()
    cursor.word()  # what the content is
    cursor.space()
    return Head(channel, recipient, start, cursor.at) if cursor.takes(MESSAGE) else None


def _recipient(cursor: Cursor) -> str:
    if not cursor.takes(_TO):
        return ""
    name = cursor.word()
    cursor.space()
    return name


def is_answer(begun: str) -> bool:
    """Whether the message that a prompt leaves open is one to the user."""
    try:
        head = head_at(begun, 0, is_first=True)
    except Unfinished:
        return False
    return head is not None and head.channel == _FINAL and not head.recipient


class HarmonyReader(MessageReader):
    """Reads one answer. names: of the functions that were offered.

    reasons: False leaves what the model says to itself in the content. begun: what the prompt says of the message that
    it leaves open, behind its role.
    """

    def __init__(self, names: Collection[str], *, reasons: bool = True, begun: str = "") -> None:
        super().__init__()
        self._names = frozenset(names)
        self._reasoning_kind = PieceKind.REASONING if reasons else PieceKind.CONTENT
        self._kind: PieceKind | None = None
        """Of the message that is open; None before the first head."""
        self._held = ""
        """Text that may be part of a head."""
        self._told: set[PieceKind] = set()
        self._break = ""
        """Stands before the next text, as it is another message's than that of its kind before."""
        self.feed(begun)
        self._told.clear()

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        pieces: list[Piece] = []
        self._held += text
        self._held = self._held[self._read(self._held, pieces) :]
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text. What closes a message, and a cut head behind it, say nothing."""
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._kind is None:
            self._kind = PieceKind.CONTENT
            held = "" if CHANNEL in held or START in held else held
        elif held.startswith(ENDS):
            held = ""
        self._text(held, pieces)
        return pieces

    def _read(self, text: str, pieces: list[Piece]) -> int:
        """How much of the text is read."""
        at = 0
        while True:
            mark = ""
            if self._kind is not None:
                found = _BEGINNING.search(text, at)
                if found is None:
                    cut = len(text) - max(partial(text[at:][-len(one) :], one) for one in _BEGINNINGS)
                    self._text(text[at:cut], pieces)
                    return cut
                self._text(text[at : found.start()], pieces)
                at, mark = found.start(), found.group()
            try:
                head = head_at(text, at, is_first=self._kind is None)
            except Unfinished:
                return at
            if head is not None:
                self._open(head, text, pieces)
                at = head.end
            elif self._kind is None:
                self._kind = PieceKind.CONTENT
            else:
                self._text(mark, pieces)
                at += len(mark)

    def _open(self, head: Head, text: str, pieces: list[Piece]) -> None:
        """A message begins."""
        name = head.recipient.removeprefix(FUNCTIONS)
        if head.recipient and name in self._names:
            pieces.append(Piece(PieceKind.CALL, name, self._n_calls))
            self._n_calls += 1
            self._kind, self._break = PieceKind.ARGUMENTS, ""
            return
        self._kind = self._reasoning_kind if head.is_reasoning else PieceKind.CONTENT
        self._break = "\n" if self._kind in self._told else ""
        if head.recipient:
            self._text(text[head.start : head.end], pieces)

    def _text(self, text: str, pieces: list[Piece]) -> None:
        kind = self._kind
        if not text or kind is None:
            return
        call = self._n_calls - 1 if kind is PieceKind.ARGUMENTS else -1
        pieces.append(Piece(kind, self._break + text, call))
        self._break = ""
        self._told.add(kind)
