"""Finds the first stop string in a text that arrives in chunks. Owns the text that may be the start of one.

`StopStrings` is made once for a request and `StopMatcher` once for each of its sequences. Together the stop strings are
one automaton (Aho and Corasick 1975), of which only the states that some text has reached are made.
Invariants: the cut does not depend on how the text is chunked; no emitted text is ever part of a stop string that
is found later; a character costs a look into a dict, however many stop strings there are.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_STATES = 4096
"""States that are remembered, about a kilobyte each with 64 stop strings; then it begins anew."""


class _Pattern:
    """One stop string (Knuth, Morris and Pratt 1977).

    The table of borders grows only as far as a match ever got, so that a long stop string costs nothing up front.
    """

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0, 0]
        """borders[k]: longest proper border of the first k characters."""

    def advance(self, matched: int, char: str) -> int:
        """How much of the stop string the text spells with `char`, when it spelled `matched` characters before it."""
        text = self.text
        if matched == len(text):
            matched = self._border(matched)
        while matched and text[matched] != char:
            matched = self._border(matched)
        return matched + 1 if text[matched] == char else matched

    def _border(self, length: int) -> int:
        borders, text = self._borders, self.text
        while len(borders) <= length:
            last = text[len(borders) - 1]
            border = borders[-1]
            while border and text[border] != last:
                border = borders[border]
            borders.append(border + 1 if text[border] == last else border)
        return borders[length]


class _State:
    """How much of each stop string the newest text spells."""

    __slots__ = ("found", "matched", "n_held", "next")

    def __init__(self, matched: tuple[int, ...], found: str | None) -> None:
        self.matched = matched
        self.found = found
        """The longest stop string that is complete."""
        self.n_held = max(matched)
        self.next: dict[str, _State] = {}


class StopStrings:
    """The stop strings of a request."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings, at least one."""
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self.firsts = frozenset(pattern.text[0] for pattern in self._patterns)
        """Characters that begin one."""
        self.start = _State((0,) * len(self._patterns), None)
        self._states: dict[tuple[int, ...], _State] = {self.start.matched: self.start}

    def after(self, state: _State, char: str) -> _State:
        """The state once `char` was read."""
        found = state.next.get(char)
        if found is None:
            found = state.next[char] = self._state(state, char)
        return found

    def _state(self, before: _State, char: str) -> _State:
        columns = zip(self._patterns, before.matched, strict=True)
        matched = tuple([pattern.advance(length, char) for pattern, length in columns])
        known = self._states.get(matched)
        if known is not None:
            return known
        if len(self._states) >= MAX_STATES:
            for state in self._states.values():
                state.next.clear()
            self._states = {self.start.matched: self.start}
        ended = [one.text for one, length in zip(self._patterns, matched, strict=True) if length == len(one.text)]
        found = self._states[matched] = _State(matched, max(ended, key=len, default=None))
        return found


class StopMatcher:
    """Cuts a text at the stop string that is complete first; of several that end together, the longest."""

    def __init__(self, stops: Sequence[str] | StopStrings, include: bool = False) -> None:
        """include: the cut comes after the stop string instead of before it."""
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include
        self._state = self._stops.start
        self._held = ""
        """Text that a match may still claim: as long as the longest part matched."""

    def feed(self, chunk: str) -> tuple[str, str | None]:
        """(text that is safe to emit now, the stop string if one was found). Nothing may be fed after one was found."""
        stops, state = self._stops, self._state
        if not state.n_held and stops.firsts.isdisjoint(chunk):
            return chunk, None
        text = self._held + chunk
        for end, char in enumerate(chunk, start=len(self._held) + 1):
            state = state.next.get(char) or stops.after(state, char)
            if state.found is not None:
                self._held = ""
                return text[: end if self._include else end - len(state.found)], state.found
        self._state = state
        self._held = text[len(text) - state.n_held :]
        return text[: len(text) - state.n_held], None

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held
