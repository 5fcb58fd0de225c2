"""Whether a text copies itself: what look-up would have guessed of it, and whether that came.

Owns one sequence's text as a string of a character a token, which Python searches as fast as C can. Does not own
drafts: nothing is verified here. Reading costs microseconds, also where a text has few distinct tokens: the search
skips little there, and goes less far.
Invariants: at most `2 * MOST_KNOWN` tokens are kept, the newest; token ids are less than `sys.maxunicode` + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ENDING: Final = 3
"""Tokens by which look-up finds a place."""
STREAK: Final = 4
"""Tokens in a row that look-up foretells, from which a text is said to copy; and again at each doubling."""
MOST_STREAK: Final = 256
"""More are counted as so many."""
MOST_AHEAD: Final = 16
"""A text that copies is read at least once in so many tokens: another copy may have begun."""
MOST_KNOWN: Final = 8192
"""Tokens in which is looked, at least, unless the ending is of few distinct ones."""
FEW: Final = 5
"""So few among the newest `ENDING + STREAK`."""
NEAR: Final = 1024
"""Tokens in which is looked then: each of them takes 5 ns or more, as it may begin the ending (docs/lab-notes.md)."""


class Repeats:
    """See the module."""

    __slots__ = ("_n_foretold", "_n_read", "_text", "n_ahead", "streak")

    def __init__(self, n_known: int) -> None:
        """n_known: tokens that are there already."""
        self._text = ""
        self._n_read = max(0, n_known - MOST_KNOWN)
        self._n_foretold = 0
        """Newest tokens that look-up foretells."""
        self.streak = 0
        """Newest tokens that are said to have been foretold: `STREAK`, twice that, ..., or 0."""
        self.n_ahead = 1
        """Tokens that must come before there is anything to be said: each makes a copy longer by one."""

    def read(self, tokens: Sequence[int]) -> bool:
        """Tokens of the sequence, of which the newest are new: whether they say that it copies, which was not said
        before."""
        n_new = len(tokens) - self._n_read
        if n_new <= 0:
            return False
        text = self._text + "".join(map(chr, tokens[self._n_read :]))
        self._text = text = text if len(text) <= 2 * MOST_KNOWN else text[-MOST_KNOWN:]
        self._n_read = len(tokens)
        self._n_foretold = found = _foretold(text, self._n_foretold, n_new)
        if found < self.streak:  # what was said was of a copy that has ended
            self.streak = 0
        if found < STREAK:
            self.n_ahead = STREAK - found
            return False
        longer = 2 * self.streak or STREAK
        says = longer <= found
        if says:
            self.streak = STREAK << ((found // STREAK).bit_length() - 1)
            longer = 2 * self.streak
        self.n_ahead = min(longer - found, MOST_AHEAD)
        return says


def _foretold(text: str, before: int, n_new: int) -> int:
    """How many tokens at the end of a text look-up foretells, of which it foretold so many before `n_new` came."""
    if not before and not _stood_before(text, 1):
        return 0  # most texts, most times
    low, high = 0, min(before + n_new, MOST_STREAK)
    if _stood_before(text, high):  # or most others
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if _stood_before(text, middle):
            low = middle
        else:
            high = middle
    return low


def _stood_before(text: str, n_foretold: int) -> bool:
    """Whether so many tokens at the end followed their `ENDING` before, too."""
    n = ENDING + n_foretold
    first = -NEAR - n if len(set(text[-ENDING - STREAK :])) <= FEW else 0
    return len(text) > n and text.rfind(text[-n:], first, -1) >= 0
