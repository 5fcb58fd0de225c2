"""The matchers of all constrained sequences of one engine: moved by tokens, asked for masks, charged for their time.

Owns how far each sequence is and what its request may still spend. Does not own processes (`engine/grammars/process`)
nor grammars (`text/grammar`). A sequence is a handle: a positive number that is never used twice.
Invariant: before work on a handle begins it stands in `marks`, so that whoever looks later knows where work stopped.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from typing import Final

import msgspec
import numpy as np

from quire.core.failure import Code, Failure
from quire.text.leading import Leading
from quire.text.matcher import Matcher, MatcherPool

MANY: Final = -1
"""What stands in `marks` while masks are made together."""
FEW: Final = 4
"""Fewer masks than these are made one by one."""
MASK_S: Final = 0.002
"""Processor seconds that a mask may take on average. The masks of a step are made while its forward pass runs, but a
slow one holds the whole step up."""
SPARE_S: Final = 0.25
"""What all masks of a request may take on top of that, or the masks of many steps together."""
TIMED_TURNS: Final = 64
"""Turns in which masks are made one by one, each charged with its time, once masks made together took too long."""
PARAM: Final = "structured_outputs"
TOO_SLOW: Final = Failure(Code.GRAMMAR_TOO_SLOW, "the masks of this grammar take too long: simplify it", PARAM)


class End(msgspec.Struct, array_like=True):
    """A sequence needs no mask any more."""

    handle: int
    failure: Failure | None = None
    """The sequence has failed. None: its output is complete, or free."""
    is_free: bool = False
    """Anything can follow; else nothing can."""


def failed(message: str) -> Failure:
    """The matcher of a sequence could not go on."""
    return Failure(Code.GRAMMAR_FAILED, message, PARAM)


@dataclasses.dataclass(slots=True)
class _Budget:
    """Processor time that a request has left."""

    spare_s: float = SPARE_S


@dataclasses.dataclass(slots=True)
class _Live:
    matcher: Matcher
    budget: _Budget
    leading: Leading | None = None
    """While it is before its constraint and the way there is bounded."""


class Matchers:
    """See the module. For one thread."""

    def __init__(
        self,
        n_threads: int,
        marks: MutableSequence[int] | memoryview[int],
        watch: Callable[[bool], None] = lambda together: None,
    ) -> None:
        """n_threads: for the masks of large steps. marks[0]: the handle that is worked on. watch: called when a piece
        of work begins (a mask, or all moves of a turn), True for many masks together."""
        self._n_threads = n_threads
        self._marks = marks
        self._watch = watch
        self._pool: MatcherPool | None = None
        self._live: dict[int, _Live] = {}
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

    def fill(self, rows: Sequence[int], bits: np.ndarray, *, one_by_one: bool = False) -> list[End]:
        """Write which tokens may come next for each row's handle: bit t % 32 of word t // 32; all of them for a handle
        that is not known. bits: int32 [len(rows), words], contiguous. Returns the ends of those that failed."""
        lines = [line for line, handle in enumerate(rows) if handle in self._live]
        found = [self._live[rows[line]] for line in lines]
        if len(lines) < len(rows):
            bits[sorted(set(range(len(rows))) - set(lines))] = -1
        if not (one_by_one or self._n_timed or len(lines) < FEW or self._n_threads < 2):
            self._fill_many(found, lines, bits)
            _narrow(found, lines, bits)
            return self._failed(rows[line] for line in lines)
        self._n_timed = max(0, self._n_timed - 1)
        for live, line in zip(found, lines, strict=True):
            self._marks[0] = rows[line]
            self._watch(False)
            start_s = time.thread_time()
            live.matcher.fill(bits[line])
            live.budget.spare_s -= time.thread_time() - start_s - MASK_S
        _narrow(found, lines, bits)
        return self._failed(rows[line] for line in lines)

    def _fill_many(self, found: list[_Live], lines: list[int], bits: np.ndarray) -> None:
        if self._pool is None:
            self._pool = MatcherPool(self._n_threads)
        self._marks[0] = MANY
        self._watch(True)
        start_s = time.process_time()
        self._pool.fill([live.matcher for live in found], lines, bits)
        taken_s = time.process_time() - start_s
        self._excess_s = max(0.0, self._excess_s + taken_s - MASK_S * len(lines))
        if self._excess_s > SPARE_S:
            self._n_timed, self._excess_s = TIMED_TURNS, 0.0

    def _failed(self, handles: Iterable[int]) -> list[End]:
        ends = []
        for handle in handles:
            error = self._live[handle].matcher.error
            if error:
                ends.append(End(handle, failed(f"the output cannot go on: {error}")))
                del self._live[handle]
        return ends


def _narrow(found: list[_Live], lines: list[int], bits: np.ndarray) -> None:
    for live, line in zip(found, lines, strict=True):
        if live.leading is not None:
            live.leading.narrow(bits[line])


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
