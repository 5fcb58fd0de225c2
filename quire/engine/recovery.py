"""What becomes of open requests when the engine is lost: who fails, who runs again, and who on trial.

Owns the order in which they reach the next engine. Does not own suspicions (`quarantine.py`), trials (`trials.py`) nor
the books of open requests (`async_llm.py`). Invariant: a request of which its reader has seen output is never run
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from quire.core.clock import Clock
from quire.core.commands import Submit
from quire.core.errors import EngineLost, QuireError, RequestQuarantined
from quire.core.events import EngineReady
from quire.engine.link import LOST
from quire.engine.quarantine import Quarantine
from quire.engine.stream import RequestStream

N_AT_ONCE = 64
"""Requests that are looked at before others get their turn: a long prompt's fingerprint takes a millisecond."""
MAX_RESTARTS = 2
"""Of one request, each time on another of several engines: it may be what they die of."""

Send = Callable[[Submit], Awaitable[None]]
Fail = Callable[[RequestStream, QuireError], None]


class Recovery:
    """See the module. `send` hands a request to the engine, `fail` ends an open one with an error."""

    def __init__(self, clock: Clock, send: Send, fail: Fail) -> None:
        self.quarantine = Quarantine(clock)
        self._send = send
        self._fail = fail

    async def begin(self, stream: RequestStream) -> None:
        """Hand a request to the engine. Raises EngineLost if there is none, RequestQuarantined for a convicted one."""
        request = stream.opened.request
        stream.trial = self.quarantine.check(request)
        await self._send(Submit(request, stream.trial))

    def follow(self, stream: RequestStream) -> None:
        """A request on trial has gained something, or ended."""
        trial = stream.trial
        if trial is not None and stream.opened.has_reached(trial.n_tokens):
            stream.trial = None
            self.quarantine.acquit(stream.opened.request)

    def fail_delivered(self, streams: Iterable[RequestStream]) -> None:
        """The engine is lost: what cannot run again fails at once. If it was guilty, the next try of it is refused."""
        for stream in list(streams):
            if stream.is_delivered:
                self._fail(stream, EngineLost(LOST))

    def run_elsewhere(self, streams: Iterable[RequestStream | None], reason: str) -> Iterator[Submit]:
        """One of several engines is lost: fail those of its requests that were delivered or have lost too many; the
        others are to be submitted again. None: it has ended."""
        for stream in streams:
            if stream is None:
                continue
            if stream.is_delivered:
                self._fail(stream, EngineLost(reason))
            elif stream.n_restarts >= MAX_RESTARTS:
                self._fail(
                    stream,
                    RequestQuarantined(
                        f"{stream.n_restarts + 1} replicas ended while they ran this request: it is not run again"
                    ),
                )
            else:
                stream.restart()
                yield Submit(stream.opened.request, stream.trial)

    async def run_again(self, streams: Iterable[RequestStream], before: int, ready: EngineReady) -> None:
        """There is an engine again: learn how the one before, number `before`, has ended; fail what is guilty or was
        delivered; run the others again, what was computed first. Raises EngineLost if this engine is lost too."""
        self.quarantine.learn(ready.ends)
        ends = [end for end in ready.ends if end.engine == before]
        computed = {working.request_id for end in ends for working in end.working}
        first: list[RequestStream] = []
        later: list[RequestStream] = []
        for stream in streams:
            (first if stream.opened.request.request_id in computed else later).append(stream)
        for number, stream in enumerate(first + later):
            if number % N_AT_ONCE == N_AT_ONCE - 1:
                await asyncio.sleep(0)
            if stream.opened.finished:
                continue
            try:
                trial = self.quarantine.check(stream.opened.request)
            except RequestQuarantined as error:
                self._fail(stream, error)
                continue
            if stream.is_delivered:
                self._fail(stream, EngineLost(LOST))
                continue
            stream.restart()
            stream.trial = trial
            await self._send(Submit(stream.opened.request, trial))
