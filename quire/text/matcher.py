"""Matchers: how far sequences have come in their grammars.

Owns masks and moves over llguidance. Does not own grammars (`text/grammar`) nor which sequence has which matcher.
"""

from __future__ import annotations

import re

import llguidance
import numpy as np

from quire.core.errors import SHOWN_CHARS

ANNOUNCED = "regex parse error:"
_REASON = re.compile(r"^error: (.+)$", re.M)
_PLACE = re.compile(r"^at \d+\(\d+\): ")


class Matcher:
    """How far one sequence has come in its grammar."""

    __slots__ = ("_inner", "n_words")

    def __init__(self, inner: llguidance.LLMatcher, n_words: int) -> None:
        self._inner = inner
        self.n_words = n_words
        """Words of a mask: a bit for each token of the tokenizer."""

    def copy(self) -> Matcher:
        """Another sequence at the same place."""
        return Matcher(self._inner.deep_copy(), self.n_words)

    def fill(self, words: np.ndarray) -> None:
        """Write which tokens may come next: bit t % 32 of word t // 32. words: int32 [n_words], contiguous. Releases
        the interpreter while it works."""
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def mask(self) -> bytes:
        """The same as bytes: bit t % 8 of byte t // 8."""
        words = np.empty(self.n_words, "<i4")
        self.fill(words)
        return words.tobytes()

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and an error for good, if it may not come here."""
        return self._inner.consume_token(token)

    def forced(self) -> list[int]:
        """The tokens that come next whatever is chosen, as long as each mask on the way allows one alone. Only for a
        matcher that is not needed any more."""
        return self._inner.compute_ff_tokens()

    @property
    def is_complete(self) -> bool:
        """Nothing but the end can follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def error(self) -> str:
        """Why it cannot go on: a limit, or a token that was not allowed; empty while it can."""
        return first_line(self._inner.get_error()) if self._inner.is_error() else ""


def first_line(text: str) -> str:
    """What a message of the library says first; the rest shows pieces of the grammar.

    Of a pattern the first line only announces the reason, at a place in a grammar that the caller never saw.
    """
    line, _, rest = text.strip().partition("\n")
    reason = _REASON.search(rest) if line.endswith(ANNOUNCED) else None
    if reason is not None:
        what = _PLACE.sub("", line.removesuffix(ANNOUNCED)).rstrip(": ").removesuffix(" (in regex)")
        line = f"{what or 'invalid regex'}: {reason[1]}"
    return line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 1] + "…"
