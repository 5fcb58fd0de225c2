"""A bound on what comes before a constraint: the reasoning of a model ends after so many tokens.

Owns the count, and which token must come next once it is spent. Does not own the grammar of what comes before
(`text/grammar`), which already says that it ends with a mark, nor masks (`text/matchers`).
Invariant: only a token that the grammar allows is ever asked for; a character that is cut in two is finished first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from quire.core.plan import MASK_WORD_BITS
from quire.core.structured import StructuredOutputsParams

SPACE: Final = b" \t\r\n"


class LeadBound(msgspec.Struct, array_like=True, frozen=True):
    """What a request says of it."""

    n_tokens: int
    mark: str
    """Ends what comes before."""
    first: str | None
    """With which it begins, or is not there at all; None: the text begins inside."""
    is_all: bool
    """What follows the mark is free: the sequence needs no mask any more."""


def lead_bound(params: StructuredOutputsParams) -> LeadBound | None:
    """None for a constraint without such a bound."""
    if params.begins_within is None or params.begins_after is None:
        return None
    return LeadBound(params.begins_within, params.begins_after, params.may_begin_with, params.kind == "free")


class Leading:
    """One sequence before its mark."""

    def __init__(self, bound: LeadBound, mark_ids: Sequence[int], spell: Callable[[int], bytes]) -> None:
        """mark_ids: the mark as tokens. spell: bytes of a token."""
        self.is_all = bound.is_all
        self.is_over = False
        """The mark has come, or there is nothing before the constraint."""
        self._left = bound.n_tokens
        self._mark, self._mark_ids, self._n_written = bound.mark.encode(), mark_ids, 0
        self._first = None if bound.first is None else bound.first.encode()
        self._spell = spell
        self._tail = b""

    def take(self, token: int) -> None:
        """Go on by a token."""
        if self.is_over:
            return
        self._tail += self._spell(token)
        if self._first is not None:
            begun = self._tail.lstrip(SPACE)
            if not begun.startswith(self._first):
                self.is_over = not self._first.startswith(begun)
                return
            self._first = None
        elif self._left > 0:
            self._left -= 1
        elif token == self._mark_ids[self._n_written]:
            self._n_written += 1
        else:
            self._n_written = 0
        self.is_over = self._mark in self._tail or self._n_written == len(self._mark_ids)
        self._tail = self._tail[-len(self._mark) :]

    def narrow(self, words: np.ndarray) -> None:
        """Leave only the next token of the mark in a mask, once the bound is reached. words: int32 [n_words]."""
        if self.is_over or self._left > 0 or self._first is not None:
            return
        token = self._mark_ids[self._n_written]
        word, bit = divmod(token, MASK_WORD_BITS)
        unsigned = words.view("<u4")
        if int(unsigned[word]) >> bit & 1:
            unsigned[:] = 0
            unsigned[word] = 1 << bit
