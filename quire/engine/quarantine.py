"""Which requests may have ended an engine, from what each engine was computing when it died.

Owns suspicions by content, so that a client's retry is the same request. Does not own trials (`trials.py`), nor what
becomes of open requests (`recovery.py`). Every API process learns of every death and so comes to the same suspicions.
The rules: what was computed when an engine died is suspect and runs apart from then on; what only waited is not. The
engine crashes or hangs while a suspect runs alone: it is guilty. It is killed, which may come from outside, or others
ran beside: guilty at the second time. A suspect that comes through its trial is none any more.
Invariants: bounded in entries and in time; the guilty are refused for `MEMORY_S`.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable

import msgspec

from quire.core.clock import Clock
from quire.core.commands import Trial
from quire.core.errors import RequestQuarantined
from quire.core.events import EndKind, EngineEnd, Working
from quire.core.request import Request
from quire.engine.trials import KNOWN, ON_TRIAL

GUILTY = 2
"""Strikes."""
MARGIN_TOKENS = 8
"""A suspect must come so much further than it was when an engine died."""
MAX_ENTRIES = 16_384
MEMORY_S = 600.0

_encode = msgspec.msgpack.Encoder().encode


def fingerprint(request: Request) -> bytes:
    """What makes a request the same when it is sent again."""
    return hashlib.blake2b(
        _encode([request.prompt_token_ids, request.params, request.max_tokens]), digest_size=16
    ).digest()


class Suspicion(msgspec.Struct):
    """What is known of one content."""

    time_s: float
    """Of the last death."""
    n_deaths: int = 0
    """Of engines that were computing it."""
    n_killed: int = 0
    """Of these, those by a kill while it ran alone."""
    strikes: int = 0
    n_outputs: int = 0
    """How far it was at most."""

    @property
    def trial(self) -> Trial:
        """How it runs from now on. First what was in most deaths, then what was at its prompt, then what is shortest.
        Last comes what was alone when the engine was killed, lest somebody who kills engines as soon as they run hits
        the same one again."""
        rank = (self.n_killed, -self.n_deaths, self.n_outputs)
        return Trial(self.n_outputs + MARGIN_TOKENS, rank)


class Quarantine:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: collections.OrderedDict[bytes, Suspicion] = collections.OrderedDict()
        self._last_engine = -1
        """Number of the last engine whose end was learnt."""

    def learn(self, ends: Iterable[EngineEnd]) -> None:
        """Draw the conclusions from the ends that were not learnt before."""
        for end in ends:
            if end.engine > self._last_engine:
                self._last_engine = end.engine
                if end.kind not in (EndKind.FAILED, EndKind.REFUSED):
                    self._judge(end)

    def check(self, request: Request) -> Trial | None:
        """How the request has to run; None if as any other. Raises RequestQuarantined if it may not run."""
        if not self._known:
            return None
        key = fingerprint(request)
        found = self._known.get(key)
        if found is None:
            return None
        if self._clock.now_s() - found.time_s > MEMORY_S:
            del self._known[key]
            return None
        if found.strikes >= GUILTY:
            raise RequestQuarantined(
                f"the engine died {found.n_deaths} times while it ran this request: it is not run again for "
                f"{MEMORY_S / 60:g} minutes"
            )
        return found.trial

    def acquit(self, request: Request) -> None:
        """It came through its trial."""
        if self._known:
            self._known.pop(fingerprint(request), None)

    def _judge(self, end: EngineEnd) -> None:
        by_mark: dict[bytes, Working] = {}
        """The copy of each content that was furthest."""
        for working in end.working:
            found = by_mark.setdefault(working.mark, working)
            if working.n_outputs > found.n_outputs:
                by_mark[working.mark] = working
        on_trial = {working.mark for working in end.working if working.stage == ON_TRIAL}
        if len(on_trial) == 1:
            [mark] = on_trial
            is_alone = all(working.mark == mark or working.stage != KNOWN for working in end.working)
            was_killed = end.kind is EndKind.KILLED
            suspicion = self._suspect(by_mark.pop(mark))
            suspicion.strikes += is_alone + (not was_killed)
            suspicion.n_killed += is_alone and was_killed
            if suspicion.strikes >= GUILTY:
                return  # that explains the death
        for working in by_mark.values():
            self._suspect(working)

    def _suspect(self, working: Working) -> Suspicion:
        found = self._known.pop(working.mark, None) or Suspicion(0.0)
        found.time_s = self._clock.now_s()
        found.n_deaths += 1
        found.n_outputs = max(found.n_outputs, working.n_outputs)
        self._known[working.mark] = found
        while len(self._known) > MAX_ENTRIES:
            self._known.popitem(last=False)
        return found
