"""The model's output as blocks: text, reasoning, calls. What /v1/responses and /v1/messages are made of.

Owns where one block ends and the next begins. Does not own reading the model's text (`text/message.py`) nor what either
API calls its blocks. Invariants: the deltas of a block join to its text; a block that was left is never added to; a
finished answer has at least one block, perhaps an empty text.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import msgspec

from quire.core.outputs import CompletionOutput
from quire.serve.openai.chat import call_id
from quire.text.message import MessageReader, Piece, PieceKind


@enum.unique
class BlockKind(enum.Enum):
    """What a block holds."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclasses.dataclass(slots=True)
class ContentBlock:
    """One block, as far as it has come. `text` of a call is its arguments."""

    kind: BlockKind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """New text of a block. `begins`: the block is new, and the one before it has ended."""

    block: ContentBlock
    delta: str
    begins: bool


class ContentBlocks:
    """Blocks of one completion, in order. reader: makes what reads a text that has more than content."""

    def __init__(self, reader: Callable[[], MessageReader] | None) -> None:
        self._reader = MessageReader() if reader is None else reader()
        self.all: list[ContentBlock] = []

    def take(self, part: CompletionOutput) -> list[Change]:
        """What a new part of the output changes."""
        pieces = self._reader.feed(part.text) if part.text else []
        if part.finish_reason is None:
            return [self._change(piece) for piece in pieces]
        changes = [self._change(piece) for piece in (*pieces, *self._reader.finish())]
        return changes if self.all else [self._begin(ContentBlock(BlockKind.TEXT, 0), "")]

    def _change(self, piece: Piece) -> Change:
        match piece.kind:
            case PieceKind.CALL:
                block = ContentBlock(BlockKind.CALL, len(self.all), call_id=call_id(), name=piece.text)
                return self._begin(block, "")
            case PieceKind.ARGUMENTS:
                kind = BlockKind.CALL
            case PieceKind.REASONING:
                kind = BlockKind.REASONING
            case PieceKind.CONTENT:
                kind = BlockKind.TEXT
        if not self.all or self.all[-1].kind is not kind:
            return self._begin(ContentBlock(kind, len(self.all)), piece.text)
        block = self.all[-1]
        block.text += piece.text
        return Change(block, piece.text, begins=False)

    def _begin(self, block: ContentBlock, text: str) -> Change:
        block.text = text
        self.all.append(block)
        return Change(block, text, begins=True)


def arguments_of(text: str) -> object:
    """The arguments of a call as an object; what the model left unfinished or wrote wrongly is given as it is."""
    if not text:
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}
