"""The matchers of all constrained sequences of one engine: moved by tokens, asked for masks, charged for their time.

Owns how far each sequence is and what its request may still spend. Does not own processes (`engine/grammars/process`)
nor grammars (`text/grammar`). A sequence is a handle: a positive number that is never used twice.
Invariants: before work on a handle begins it stands in `marks`, so that whoever looks later knows where work stopped;
what is done along drafts is done by copies, so that a draft which does not count has never been.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, MutableSequence, Sequence
from typing import Final

import msgspec
import numpy as np

from quire.core.failure import Code, Failure
from quire.core.plan import SpanDrafts
from quire.text.leading import Leading
from quire.text.matcher import Matcher

MANY: Final = -1
"""What stands in `marks` while masks are made together. `MANY - handle`: work along its drafts."""
FEW: Final = 4
"""Fewer masks than these are made one by one."""
MASK_S: Final = 0.002
"""Processor seconds that a mask may take on average. The masks of a step are made while its forward pass runs, but a
slow one holds the whole step up."""
SPARE_S: Final = 0.25
"""What all masks of a request may take on top of that, or the masks of many steps together."""
TIMED_TURNS: Final = 64
"""Turns in which masks are made one by one, each charged with its time, once masks made together took too long."""
NO_DRAFTS: Final = SpanDrafts()
PARAM: Final = "structured_outputs"
TOO_SLOW: Final = Failure(Code.GRAMMAR_TOO_SLOW, "the masks of this grammar take too long: simplify it", PARAM)


class End(msgspec.Struct, array_like=True):
    """A sequence needs no mask any more."""

    handle: int
    failure: Failure | None = None
    """The sequence has failed. None: its output is complete, or free."""
    is_free: bool = False
    """Anything can follow; else nothing can."""


class Foretold(msgspec.Struct, array_like=True):
    """The tokens that must come behind a sequence and so many of its drafts, from the one that its masks are for."""

    n_drafts: int = 0
    tokens: list[int] = []


def failed(message: str) -> Failure:
    """The matcher of a sequence could not go on."""
    return Failure(Code.GRAMMAR_FAILED, message, PARAM)


@dataclasses.dataclass(slots=True)
class _Budget:
    """Processor time that a request has left."""

    spare_s: float = SPARE_S
    ahead_s: float = SPARE_S
    """The same for masks behind drafts: when it is spent there are no more of them, and nothing ends."""


@dataclasses.dataclass(slots=True)
class _Live:
    matcher: Matcher
    budget: _Budget
    leading: Leading | None = None
    """While it is before its constraint and the way there is bounded."""

    def copy(self) -> _Live:
        return _Live(self.matcher.copy(), self.budget, copy.copy(self.leading))


@dataclasses.dataclass(slots=True)
class _Line:
    """A mask to be made."""

    at: int
    handle: int
    live: _Live
    n_drafts: int = 0
    """It is behind so many drafts, one after the other, of which nobody knows whether they count."""

    @property
    def is_ahead(self) -> bool:
        return self.n_drafts > 0


class Matchers:
    """See the module. For one thread."""

    def __init__(
        self,
        marks: MutableSequence[int] | memoryview[int],
        watch: Callable[[bool], None] = lambda together: None,
    ) -> None:
        """marks[0]: the handle that is worked on. watch: called when a piece
        of work begins (a mask, or all moves of a turn), True for many masks together."""
        self._marks = marks
        self._watch = watch
        self._live: dict[int, _Live] = {}
        self._deepest: dict[int, _Line] = {}
        """The mask of each sequence in the newest turn that is behind the most drafts, the first of several."""
        self._n_timed = 0
        """Turns that are still to be timed mask by mask."""
        self._excess_s = 0.0
        """How much longer than they may the masks of turns have taken of late."""

    def begin(
        self,
        handles: Sequence[int],
        matcher: Matcher,
        tokens: Sequence[Sequence[int]],
        leading: Callable[[], Leading | None] = lambda: None,
    ) -> list[End]:
        """The sequences of one request, each moved by the tokens that it has already. matcher: at the beginning.
        leading: makes the bound of each on what comes before its constraint."""
        budget = _Budget()
        for at, handle in enumerate(handles):
            self._live[handle] = _Live(matcher if at == len(handles) - 1 else matcher.copy(), budget, leading())
        return self.advance([(handle, some) for handle, some in zip(handles, tokens, strict=True) if some])

    def advance(self, moves: Sequence[tuple[int, Sequence[int]]]) -> list[End]:
        """Move sequences by tokens, each list (handle, tokens); the ends that this leads to."""
        ends = []
        self._watch(False)
        for handle, tokens in moves:
            live = self._live.get(handle)
            if live is None:
                continue
            self._marks[0] = handle
            end = _moved(handle, live, tokens)
            if end is not None:
                del self._live[handle]
                ends.append(end)
        return ends

    def drop(self, handles: Sequence[int]) -> None:
        """Forget sequences."""
        for handle in handles:
            self._live.pop(handle, None)

    def fill(
        self,
        rows: Sequence[int],
        bits: np.ndarray,
        drafts: Sequence[SpanDrafts] = (),
        *,
        lines: Sequence[int] = (),
        unfollowed: Sequence[int] = (),
        one_by_one: bool = False,
    ) -> list[End]:
        """Write which tokens may come next for each row's handle: bit t % 32 of word t // 32; all of them for a handle
        that is not known. Returns the ends of those that failed.

        drafts: for each row tokens that may follow; each has a line of its own behind the row's: what may come next if
        it and those that it follows do. Nothing may where no token counts, as behind a draft that the grammar excludes.
        lines: where in `bits` the line of each row is; without it, one row's lines are behind the other's.
        unfollowed: handles along whose drafts nothing is to be done.
        bits: int32 [lines, words], contiguous.
        """
        found = self._lines(rows, drafts or [NO_DRAFTS] * len(rows), bits, lines, unfollowed)
        if one_by_one or self._n_timed or len(found) < FEW:
            self._n_timed = max(0, self._n_timed - 1)
            self._fill_each(found, bits)
        else:
            self._fill_many(found, bits)
        for line in found:
            if line.live.leading is not None:
                line.live.leading.narrow(bits[line.at])
        self._deepest = {}
        for line in found:
            if line.n_drafts > self._deepest.setdefault(line.handle, line).n_drafts:
                self._deepest[line.handle] = line
        return self._failed(found, bits)

    def foretell(self, rows: Sequence[int], bits: np.ndarray, most: int) -> list[Foretold]:
        """What must come, at most so many tokens for each row's handle, behind most drafts that `fill` has followed.
        Matchers are asked where one word of the mask there, in `bits`, allows anything: elsewhere more than one token
        may come."""
        found = [Foretold() for _ in rows]
        for at, handle in enumerate(rows):
            line = self._deepest.get(handle)
            if line is None or line.live.leading is not None or np.count_nonzero(bits[line.at]) != 1:
                continue
            self._marks[0] = MANY - handle
            self._watch(False)
            found[at] = Foretold(line.n_drafts, line.live.matcher.copy().forced()[:most])
        return found

    def _lines(
        self,
        rows: Sequence[int],
        drafts: Sequence[SpanDrafts],
        bits: np.ndarray,
        starts: Sequence[int],
        unfollowed: Sequence[int],
    ) -> list[_Line]:
        """Those that matchers write; the others are written here."""
        lines = list[_Line]()
        starts = starts or [0, *itertools.accumulate(1 + len(one) for one in drafts)][:-1]
        for handle, guesses, at in zip(rows, drafts, starts, strict=True):
            end, live = at + 1 + len(guesses), self._live.get(handle)
            if live is None:
                bits[at:end] = -1
                continue
            lines.append(_Line(at, handle, live))
            if guesses:
                bits[at + 1 : end] = 0
                # without time for masks behind drafts there are none
                if handle not in unfollowed and live.budget.ahead_s >= 0:
                    lines += self._ahead(lines[-1], guesses)
        return lines

    def _ahead(self, first: _Line, drafts: SpanDrafts) -> list[_Line]:
        """Behind each draft, along each branch up to the first that cannot be chosen, or with which the sequence needs
        no mask more: nothing is done for those below."""
        lines = {-1: first}
        self._marks[0] = MANY - first.handle
        self._watch(False)
        for place, token in enumerate(drafts.tokens):
            above = lines.get(drafts.above(place))
            if above is None:
                continue
            live = above.live.copy()
            if _moved(first.handle, live, [token]) is None:
                lines[place] = _Line(first.at + 1 + place, first.handle, live, above.n_drafts + 1)
        del lines[-1]
        return list(lines.values())

    def _fill_each(self, lines: list[_Line], bits: np.ndarray) -> None:
        for line in lines:
            budget = line.live.budget
            if line.is_ahead and budget.ahead_s < 0:
                continue
            self._marks[0] = MANY - line.handle if line.is_ahead else line.handle
            self._watch(False)
            start_s = time.thread_time()
            line.live.matcher.fill(bits[line.at])
            excess_s = time.thread_time() - start_s - MASK_S
            if line.is_ahead:
                budget.ahead_s -= excess_s
            else:
                budget.spare_s -= excess_s

    def _fill_many(self, lines: list[_Line], bits: np.ndarray) -> None:
        self._marks[0] = MANY
        self._watch(True)
        start_s = time.thread_time()
        for line in lines:
            line.live.matcher.fill(bits[line.at])
        taken_s = time.thread_time() - start_s
        self._excess_s = max(0.0, self._excess_s + taken_s - MASK_S * len(lines))
        if self._excess_s > SPARE_S:
            self._n_timed, self._excess_s = TIMED_TURNS, 0.0

    def _failed(self, lines: list[_Line], bits: np.ndarray) -> list[End]:
        """Sequences without a mask. A matcher that fails behind drafts says so again if these come true."""
        ends = []
        for line in lines:
            error = line.live.matcher.error
            if error and line.is_ahead:
                bits[line.at] = 0
            elif error:
                ends.append(End(line.handle, failed(f"the output cannot go on: {error}")))
                del self._live[line.handle]
        return ends


def _moved(handle: int, live: _Live, tokens: Sequence[int]) -> End | None:
    for token in tokens:
        if not live.matcher.accept(token):
            text = live.matcher.error or "a token was not allowed"
            return End(handle, failed(f"the output cannot go on: {text}"))
        if live.leading is not None:
            live.leading.take(token)
            if live.leading.is_over and live.leading.is_all:
                return End(handle, is_free=True)
            live.leading = None if live.leading.is_over else live.leading
    if live.budget.spare_s < 0:
        return End(handle, TOO_SLOW)
    return End(handle) if live.matcher.is_complete else None
