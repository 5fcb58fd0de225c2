"""The matchers of all sequences of an engine, spread over processes: each moves its own and makes their masks.

Owns the memory that masks are written to, and which sequence is in which process. Does not own what becomes of a
process (`link.py`).
Invariant: the sequences of a request share a process, as they share what its masks may take.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from quire.core.plan import SpanDrafts
from quire.engine.grammars.link import SPIN_S, MatcherLink
from quire.engine.grammars.processes import GrammarProcesses
from quire.engine.grammars.wire import MAY_REPEAT, Begun, Turn
from quire.text.leading import LeadBound
from quire.text.matchers import End, Foretold

FEW: Final = 8
"""Sequences of a process before there is another one."""
REPEATS: Final = MAY_REPEAT and SPIN_S > 0
"""Whether turns that are as the one before are asked for without messages: only those who wait awake notice at once."""
GATHER_S: Final = 0.003
"""Requests that begin so soon after another share its first step, if there is nothing else to do meanwhile."""
DEAR_S: Final = 0.02
"""A grammar that takes longer to compile is in one process only."""


@dataclasses.dataclass(slots=True)
class Masks:
    """What a turn has brought."""

    ends: list[End]
    """Sequences that ended by their moves, or have no mask."""
    bits: np.ndarray
    """int32 [lines, words], good until the next turn."""
    foretold: list[Foretold]
    """Of each row, if that was asked for."""


class MatcherLinks:
    """See the module. For the engine's own thread."""

    def __init__(
        self,
        processes: GrammarProcesses,
        on_wait: Callable[[], None] | None = None,
        on_blame: Callable[[int], None] | None = None,
        pin: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """on_wait: called now and then while a step waits for its masks; on_blame: with a handle whose matcher has
        ended its process; pin: once, with the memory of the masks."""
        settings = processes.settings
        n_bytes = 4 * settings.n_words * settings.n_rows
        self._descriptor = os.memfd_create("quire-masks")
        os.ftruncate(self._descriptor, n_bytes)
        self._bits = np.frombuffer(mmap.mmap(self._descriptor, n_bytes), "<i4").reshape(settings.n_rows, -1)
        if pin is not None:
            pin(self._bits)
        unfollowed: dict[str, None] = {}
        self._links = [MatcherLink(processes, self._descriptor, unfollowed) for _ in range(settings.n_processes)]
        for link in self._links:
            link.on_wait, link.on_blame = on_wait, on_blame
        self._homes: dict[int, MatcherLink] = {}
        """Where each sequence is."""
        self._asked: list[tuple[MatcherLink, list[int]]] = []
        """Processes that make a turn, and which rows of it."""
        self._rows: list[int] = []
        self._last: list[tuple[MatcherLink, list[int]]] = []
        """Of the newest turn, if it can be repeated: handles, processes and which rows each has."""
        self._n_rows, self._n_lines = 0, 0
        self._late: list[End] = []
        """Ends that are still to be told."""

    def begin(self, handles: list[int], grammar: str, compile_s: float, lead: LeadBound | None = None) -> None:
        """The sequences of a request are going to need masks; `begun` says when they can have them."""
        if compile_s > DEAR_S:
            link = self._links[zlib.crc32(grammar.encode()) % len(self._links)]
        else:
            link = min(self._links[: 1 + len(self._homes) // FEW], key=len)
        for handle in handles:
            self._homes[handle] = link
        link.begin(handles, grammar, compile_s, lead)

    def begun(self, wait_s: float) -> list[Begun]:
        """What has begun since the last call; waits for the first up to `wait_s`, and then for others `GATHER_S`."""
        end_s, found = time.monotonic() + wait_s, list[Begun]()
        while True:
            waiting = [link for link in self._links if link.is_beginning]
            share_s = (min(wait_s, GATHER_S) if found else wait_s) / max(len(waiting), 1)
            had_any = bool(found)
            found += [begun for link in self._links for begun in link.begun(share_s if link in waiting else 0.0)]
            if found and not had_any:
                end_s = time.monotonic() + min(wait_s, GATHER_S)
            if not waiting or time.monotonic() >= end_s:
                return found

    def drop(self, handles: Sequence[int]) -> None:
        """Forget sequences; one that is not known is ignored."""
        for handle in handles:
            link = self._homes.pop(handle, None)
            if link is not None:
                link.drop([handle])

    def ask(
        self,
        moves: list[tuple[int, list[int]]],
        rows: list[int],
        drafts: Sequence[SpanDrafts] = (),
        most_foretold: int = 0,
    ) -> None:
        """Have sequences moved by tokens, then masks made; `answer` waits for it. rows: a handle for each mask; drafts:
        of each row, as in `Turn`."""
        if self._asked:  # a process could not answer: the others have written what nobody took
            self._late += self.answer().ends
        if self._repeat(moves, rows):
            return
        turns = {id(link): (link, Turn([], [], most_foretold=most_foretold), list[int]()) for link in self._links}
        for handle, tokens in moves:
            if handle in self._homes:
                turns[id(self._homes[handle])][1].moves.append((handle, tokens))
        at = 0
        for row, handle in enumerate(rows):
            n_lines = 1 + (len(drafts[row]) if drafts else 0)
            link = self._homes.get(handle)
            if link is None:
                self._bits[at : at + n_lines] = -1
            else:
                _, turn, own = turns[id(link)]
                own.append(row)
                turn.rows.append(handle)
                turn.lines.append(at)
                turn.drafts += drafts[row : row + 1]
            at += n_lines
        self._n_rows, self._n_lines, self._asked = len(rows), at, []
        for link, turn, own in turns.values():
            if turn.moves or turn.rows:
                self._asked.append((link, own))
                link.ask(turn)
        is_plain = REPEATS and not drafts and not most_foretold and all(handle in self._homes for handle in rows)
        self._rows, self._last = rows, [(link, own) for link, own in self._asked if own] if is_plain else []

    def _repeat(self, moves: list[tuple[int, list[int]]], rows: list[int]) -> bool:
        """Most turns are the one before with one token more of each sequence: then that is all that is said."""
        if not self._last or rows != self._rows or [handle for handle, _ in moves] != rows:
            return False
        tokens = [token for _, said in moves for token in said]
        if len(tokens) != len(rows) or not all(link.may_repeat for link, _ in self._last):
            return False
        self._asked = list(self._last)
        for link, own in self._last:
            link.repeat([tokens[row] for row in own])
        return True

    def answer(self) -> Masks:
        """Wait for what was asked."""
        found, self._late = Masks(self._late, self._bits[: self._n_lines], []), []
        while self._asked:
            link, rows = self._asked.pop()
            turned = link.answer()
            found.ends += turned.ends
            if turned.foretold:
                found.foretold = found.foretold or [Foretold() for _ in range(self._n_rows)]
                for row, one in zip(rows, turned.foretold, strict=True):
                    found.foretold[row] = one
        for end in found.ends:
            self._homes.pop(end.handle, None)
        return found

    def close(self) -> None:
        """End the processes and forget everything."""
        for link in self._links:
            link.close()
        self._homes.clear()
        os.close(self._descriptor)
