"""Token ids of one sequence to text, piece by piece. Owns the bytes of a character that is not complete yet.

Invariants: emitted text is never taken back; what is held back is bounded (3 bytes, or `MAX_PENDING` tokens);
with byte-level tokenizers the pieces join to exactly the text of the whole sequence.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Final

from quire.text.tokenizer import Tokenizer

MAX_PENDING: Final = 8
"""Tokens that may wait for the rest of a character when a decoder looks at neighbours."""
N_CONTEXT: Final = 6
"""Emitted tokens that such a decoder sees again."""


class Detokenizer:
    """Incremental text of one sequence. It continues a prompt: a leading space of the first token is kept."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        pieces = tokenizer.pieces(skip_special_tokens)
        self._decoder: _ByPieces | _ByWindow = (
            _ByWindow(tokenizer, skip_special_tokens) if pieces is None else _ByPieces(pieces)
        )

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return self._decoder.feed(token_ids)

    def flush(self) -> str:
        """What was held back, incomplete characters as U+FFFD. Nothing may be fed afterwards."""
        return self._decoder.flush()


class _ByPieces:
    """For decoders where a token's bytes do not depend on its neighbours: an incremental UTF-8 decoder does the rest.

    Invalid bytes become U+FFFD, one for each maximal part of a character (Unicode 15, section 3.9), as in Rust.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._utf8.decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _ByWindow:
    """For other decoders: decode the newest tokens with and without the new ones, and emit the difference."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        known = self._tokenizer.decode(self._context, self._skip)
        text = self._tokenizer.decode(self._context + self._pending, self._skip)
        self._context = (self._context + self._pending)[-N_CONTEXT:]
        self._pending = []
        return text[len(known) :]

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._context + self._pending, self._skip)
        waits = text.endswith("�") and len(self._pending) < MAX_PENDING
        return "" if waits else self.flush()
