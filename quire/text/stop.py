"""Finds the first stop string in a text that arrives in chunks. Owns the text that may be the start of one.

Invariants: the cut does not depend on how the text is chunked; no emitted text is ever part of a stop string that
is found later; work is linear in the text for a given list of stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string and how much of it the newest text spells (Knuth, Morris and Pratt 1977).

    The table of borders grows only as far as a match ever got, so that a long stop string costs nothing up front.
    """

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0, 0]
        """borders[k]: longest proper border of the first k characters."""

    def advance(self, char: str) -> bool:
        """Take the next character of the text; True if the stop string ends with it."""
        text, matched = self.text, self.matched
        while matched and text[matched] != char:
            matched = self._border(matched)
        if text[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(text)

    def _border(self, length: int) -> int:
        borders, text = self._borders, self.text
        while len(borders) <= length:
            last = text[len(borders) - 1]
            border = borders[-1]
            while border and text[border] != last:
                border = borders[border]
            borders.append(border + 1 if text[border] == last else border)
        return borders[length]


class StopMatcher:
    """Cuts a text at the stop string that is complete first; of several that end together, the longest."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """stops: non-empty strings. include: the cut comes after the stop string instead of before it."""
        self._include = include
        self._by_first: dict[str, list[_Pattern]] = {}
        for stop in dict.fromkeys(stops):
            self._by_first.setdefault(stop[0], []).append(_Pattern(stop))
        self._firsts = frozenset(self._by_first)
        self._active: list[_Pattern] = []
        """Patterns of which a part is matched."""
        self._held = ""
        """Text that a match may still claim: as long as the longest part matched."""

    def feed(self, chunk: str) -> tuple[str, str | None]:
        """(text that is safe to emit now, the stop string if one was found). Nothing may be fed after one was found."""
        if not self._active and self._firsts.isdisjoint(chunk):
            return chunk, None
        text = self._held + chunk
        for end, char in enumerate(chunk, start=len(self._held) + 1):
            found = self._advance(char)
            if found is not None:
                self._held = ""
                return text[: end if self._include else end - len(found)], found
        n_held = max([pattern.matched for pattern in self._active], default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], None

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: list[str] = []
        active = self._active
        for pattern in active:
            if pattern.advance(char):
                found.append(pattern.text)
        for pattern in self._by_first.get(char, ()):
            if pattern.matched == 0:
                active.append(pattern)
                if pattern.advance(char):
                    found.append(pattern.text)
        self._active = [pattern for pattern in active if pattern.matched]
        return max(found, key=len, default=None)
