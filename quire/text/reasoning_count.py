"""How many tokens of a model's output are reasoning. Does not own where it begins and ends in text (`reasoning.py`).

Counted are the tokens that hold some of it: after `BEGIN`, if the model writes that, and before `END`. Marks of several
tokens are found as one; control tokens are no reasoning.
Invariant: the count does not depend on how the output was cut; a token that is looked at twice may belong to a mark.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Protocol

from quire.text.reasoning import BEGIN, END, MAX_SPACE, SPACE
from quire.text.tokenizer import Tokenizer

_BEGIN, _END, _SPACE = BEGIN.encode(), END.encode(), SPACE.encode()
_MOST_HELD: Final = len(_END) - 1
"""Last bytes of a text in which a mark may have begun."""


class CountsReasoning(Protocol):
    """Counts in the tokens of one output."""

    @property
    def n_tokens(self) -> int:
        """Tokens of reasoning in what was fed."""

    def feed(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the output."""


class ReasoningCount:
    """Counts in the tokens of one output. inside: the prompt ended with `BEGIN`, as for `ReasoningReader`."""

    def __init__(self, inside: bool, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces(skip_special_tokens=False)
        self._bytes_of = tokenizer.token_bytes if pieces is None else pieces.__getitem__
        self._special_ids = tokenizer.special_ids
        self._is_inside, self._is_over = inside, False
        self._held: list[int] = []
        """Tokens that may be part of a mark."""
        self._n_tokens = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of reasoning in what was fed."""
        return self._n_tokens + (sum(bool(self._spell(one)) for one in self._held) if self._is_inside else 0)

    def feed(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the output. After the end of the reasoning this costs nothing."""
        if self._is_over:
            return
        self._held += token_ids
        pieces = [self._spell(token_id) for token_id in self._held]
        if not self._is_inside:
            pieces = self._begin(pieces)
        if self._is_inside:
            self._go_on(pieces)

    def _begin(self, pieces: list[bytes]) -> list[bytes]:
        """Look for `BEGIN`; the pieces after it."""
        text = b"".join(pieces)
        stripped = text.lstrip(_SPACE)
        n_spaces = len(text) - len(stripped)
        if n_spaces <= MAX_SPACE and stripped.startswith(_BEGIN):
            self._is_inside = True
            n_before = sum(stop <= n_spaces + len(_BEGIN) for stop in itertools.accumulate(map(len, pieces)))
            del self._held[:n_before]
            return pieces[n_before:]
        if n_spaces > MAX_SPACE or not _BEGIN.startswith(stripped):
            self._is_over = True
            self._held.clear()
        return pieces

    def _go_on(self, pieces: list[bytes]) -> None:
        """Count what is before `END`, and hold what may be a part of it."""
        end = b"".join(pieces).find(_END)
        if end >= 0:
            starts = itertools.accumulate(map(len, pieces), initial=0)
            n_before = sum(start < end for start, _ in zip(starts, pieces, strict=False))
            self._n_tokens += sum(map(bool, pieces[:n_before]))
            self._is_over, self._is_inside = True, False
            self._held.clear()
            return
        n_held = n_bytes = 0
        while n_held < len(pieces) and n_bytes < _MOST_HELD:
            n_held += 1
            n_bytes += len(pieces[-n_held])
        cut = len(pieces) - n_held
        self._n_tokens += sum(map(bool, pieces[:cut]))
        del self._held[:cut]

    def _spell(self, token_id: int) -> bytes:
        """What a token adds to the text; a control token does so only if it is a mark."""
        piece = self._bytes_of(token_id)
        return b"" if token_id in self._special_ids and piece not in (_BEGIN, _END) else piece
