"""Whether a text copies itself: what look-up would have guessed of it, and whether that came.

Owns one sequence's endings of `ENDING` tokens. Does not own drafts: nothing is verified here, so that a text without
drafts is watched for the price of a dictionary.
Invariant: of the tokens but for the last ones of a long text each is read once, `MOST_READ` of them in a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ENDING: Final = 3
STREAK: Final = 4
"""Tokens in a row that look-up foretells, from which a text is said to copy; and again at each doubling."""
MOST_READ: Final = 256
MOST_KNOWN: Final = 8192
"""Tokens of a prompt, its last ones, in which is looked."""


class Repeats:
    """See the module."""

    __slots__ = ("_n_read", "_place", "_places", "streak")

    def __init__(self, n_known: int) -> None:
        """n_known: tokens that are there already."""
        self._places: dict[tuple[int, int, int], int] = {}
        """Ending → where the token behind its latest place stands."""
        self._place = 0
        """The token that comes next by look-up; 0: none."""
        self._n_read = max(ENDING, n_known - MOST_KNOWN)
        self.streak = 0

    def read(self, tokens: Sequence[int]) -> bool:
        """Tokens of the sequence, of which the newest are new: whether they say that it copies, which was not said
        before."""
        places, place, streak, begins = self._places, self._place, self.streak, False
        start, end = self._n_read, min(len(tokens), self._n_read + MOST_READ)
        if end <= start:
            return False
        second, third = tokens[start - 2 : start]
        for at in range(start, end):
            first, second, third = second, third, tokens[at]
            if place and tokens[place] == third:
                streak, place = streak + 1, place + 1
                begins |= streak >= STREAK and not streak & (streak - 1)
            else:
                streak = place = 0
            ending = first, second, third
            if not place:
                place = places.get(ending, 0)
            places[ending] = at + 1
        self._place, self.streak, self._n_read = place, streak, end
        return begins and end == len(tokens)
