"""A model's text as a message: reasoning, content and tool calls, piece by piece.

Owns the pieces and their order. Does not own the formats (`reasoning.py`, `tool_formats.py`).
Invariants: the pieces of a text do not depend on how it was cut into chunks, except that those of one kind may be cut
too; text that fits no format stays content, but for a call that was forced and cut; what is held back is bounded.
"""

from __future__ import annotations

import dataclasses
import enum

from quire.text.reasoning import ReasoningReader
from quire.text.tool_calls import CallArguments, CallBegin, ReadsCalls


@enum.unique
class PieceKind(enum.Enum):
    """What a piece belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """A tool call begins; the text is the function's name."""
    ARGUMENTS = "arguments"
    """More of the JSON text of the newest call's arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message."""

    kind: PieceKind
    text: str
    call: int = -1
    """Number of the call, from 0, for the two kinds that have one."""


@dataclasses.dataclass(slots=True)
class Call:
    """A tool call of a whole message."""

    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class WholeMessage:
    """All pieces of a text, joined."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[Call] = dataclasses.field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        match piece.kind:
            case PieceKind.REASONING:
                self.reasoning = (self.reasoning or "") + piece.text
            case PieceKind.CONTENT:
                self.content = (self.content or "") + piece.text
            case PieceKind.CALL:
                self.calls.append(Call(piece.text))
            case PieceKind.ARGUMENTS:
                self.calls[piece.call].arguments += piece.text


class MessageReader:
    """Reads one message. Either part may be absent: its text is content then.

    must_call: the model was made to call, so that a mark or head of a call that the text's end cuts is no content.
    """

    def __init__(
        self, reasoning: ReasoningReader | None = None, tools: ReadsCalls | None = None, *, must_call: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._must_call = must_call
        self._n_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text)
            if thought:
                pieces.append(Piece(PieceKind.REASONING, thought))
        return pieces + self._content(text) if text else pieces

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text. Nothing may be fed afterwards."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            thought, text = self._reasoning.finish()
            if thought:
                pieces.append(Piece(PieceKind.REASONING, thought))
            if text:
                pieces += self._content(text)
        if self._tools is not None:
            pieces += self._pieces(self._tools.finish())
        return [one for one in pieces if one.kind is not PieceKind.CONTENT] if self._must_call else pieces

    def whole(self, text: str) -> WholeMessage:
        """The message of a whole text. The reader cannot be used afterwards."""
        message = WholeMessage()
        for piece in (*self.feed(text), *self.finish()):
            message.add(piece)
        return message

    @property
    def n_calls(self) -> int:
        """Tool calls that have begun."""
        return self._n_calls

    def _content(self, text: str) -> list[Piece]:
        return [Piece(PieceKind.CONTENT, text)] if self._tools is None else self._pieces(self._tools.feed(text))

    def _pieces(self, found: list[str | CallBegin | CallArguments]) -> list[Piece]:
        pieces = []
        for one in found:
            if isinstance(one, str):
                pieces.append(Piece(PieceKind.CONTENT, one))
            elif isinstance(one, CallBegin):
                pieces.append(Piece(PieceKind.CALL, one.name, self._n_calls))
                self._n_calls += 1
            else:
                pieces.append(Piece(PieceKind.ARGUMENTS, one.text, self._n_calls - 1))
        return pieces
