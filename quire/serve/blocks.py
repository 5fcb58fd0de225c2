"""The model's output as blocks: text, reasoning, calls. What /v1/responses and /v1/messages are made of.

Owns where one block ends and the next begins. Does not own what either API calls them.
Invariants: the deltas of a block join to its text; a block that was left is never added to; a finished answer has at
least one block, perhaps an empty text.
"""

from __future__ import annotations

import dataclasses
import enum

from quire.core.outputs import CompletionOutput


@enum.unique
class BlockKind(enum.Enum):
    """What a block holds."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclasses.dataclass(slots=True)
class Block:
    """One block, as far as it has come. `text` of a call is its arguments."""

    kind: BlockKind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """New text of a block. `begins`: the block is new, and the one before it has ended."""

    block: Block
    delta: str
    begins: bool


class Blocks:
    """Blocks of one completion, in order."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def take(self, part: CompletionOutput) -> list[Change]:
        """What a new part of the output changes."""
        is_empty_answer = part.finish_reason is not None and not self.all
        return [self._add(BlockKind.TEXT, part.text)] if part.text or is_empty_answer else []

    def _add(self, kind: BlockKind, delta: str) -> Change:
        begins = not self.all or self.all[-1].kind is not kind
        if begins:
            self.all.append(Block(kind, len(self.all)))
        block = self.all[-1]
        block.text += delta
        return Change(block, delta, begins)
