"""Which requests may have ended the engine: suspects run one at a time, and one of which it died twice runs no more.

Owns strikes by content, so that a client's retry is the same request. Does not own replaying (`replay.py`).
The rule: every request that was open when the engine died is a suspect. A suspect is on trial while it runs with no
other suspect; if the engine dies meanwhile it is guilty. The guilty are refused for `MEMORY_S`.
Invariant: bounded in entries and in time.
"""

from __future__ import annotations

import collections
import hashlib

import msgspec

from quire.core.clock import Clock
from quire.core.errors import RequestQuarantined
from quire.core.request import Request

GUILTY = 2
MAX_ENTRIES = 4096
MEMORY_S = 600.0

_encode = msgspec.msgpack.Encoder().encode


def fingerprint(request: Request) -> bytes:
    """What makes a request the same when it is sent again."""
    return hashlib.blake2b(
        _encode([request.prompt_token_ids, request.params, request.max_tokens]), digest_size=16
    ).digest()


class Quarantine:
    """Strikes of requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._strikes: collections.OrderedDict[bytes, tuple[int, float]] = collections.OrderedDict()

    def suspect(self, request: Request) -> None:
        """The engine died while this request was open, among others."""
        self._strike(fingerprint(request), 1)

    def convict(self, request: Request) -> RequestQuarantined:
        """The engine died while this request was on trial."""
        self._strike(fingerprint(request), GUILTY)
        return self._refusal()

    def is_suspect(self, request: Request) -> bool:
        """True if it has to run alone. Raises RequestQuarantined if it may not run."""
        if not self._strikes:
            return False
        key = fingerprint(request)
        strikes, time_s = self._strikes.get(key, (0, 0.0))
        if strikes and self._clock.now_s() - time_s > MEMORY_S:
            del self._strikes[key]
            return False
        if strikes >= GUILTY:
            raise self._refusal()
        return strikes > 0

    def acquit(self, request: Request) -> None:
        """It ran alone to its end and the engine lives."""
        if self._strikes:
            self._strikes.pop(fingerprint(request), None)

    def _strike(self, key: bytes, strikes: int) -> None:
        self._strikes[key] = (strikes, self._clock.now_s())
        self._strikes.move_to_end(key)
        while len(self._strikes) > MAX_ENTRIES:
            self._strikes.popitem(last=False)

    def _refusal(self) -> RequestQuarantined:
        return RequestQuarantined("the engine died twice while it ran this request: it is not run again")
