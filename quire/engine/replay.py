"""What becomes of open requests when the engine is lost, and the trials in which suspects run one at a time.

Owns who runs again, who fails and who is convicted. Does not own strikes (`quarantine.py`) nor the books of open
requests (`async_llm.py`). Invariant: a request of which its reader has seen output is never run again.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable, Iterable

from quire.core.clock import Clock
from quire.core.errors import EngineError, EngineLost, QuireError
from quire.core.request import Request
from quire.engine.link import LOST
from quire.engine.quarantine import Quarantine
from quire.engine.stream import RequestStream

LINGER_S = 0.1
"""A suspect that has made its first token stays alone for so long; then the next one runs beside it."""
LOOK_S = 0.01

Send = Callable[[Request], Awaitable[None]]


class Replay:
    """See the module. `send` hands a request to the engine."""

    def __init__(self, clock: Clock, send: Send) -> None:
        self.quarantine = Quarantine(clock)
        self._clock = clock
        self._send = send
        self._queue: collections.deque[RequestStream] = collections.deque()
        self._on_trial: RequestStream | None = None
        self._task: asyncio.Task[None] | None = None

    async def begin(self, stream: RequestStream) -> None:
        """Hand a new request to the engine, or to the trials if it is a suspect. Raises EngineLost if there is no
        engine, RequestQuarantined for a convicted one."""
        request = stream.opened.request
        if not self.quarantine.is_suspect(request):
            await self._send(request)
            return
        self._queue.append(stream)
        self.go_on()

    def sort_out(self, streams: Iterable[RequestStream]) -> tuple[list[RequestStream], dict[RequestStream, QuireError]]:
        """The engine is lost: (those to be sent to the next one at once, in order; those that fail, and how).

        Suspects that can run again wait for `go_on`.
        """
        guilty, waiting = self._on_trial, set(self._queue)
        if self._task is not None:
            self._task.cancel()
            self._task = self._on_trial = None
        again: list[RequestStream] = []
        failed: dict[RequestStream, QuireError] = {}
        for stream in streams:
            if stream is guilty:
                failed[stream] = self.quarantine.convict(stream.opened.request)
            elif stream not in waiting:
                if guilty is None:
                    self.quarantine.suspect(stream.opened.request)
                if stream.is_delivered:
                    failed[stream] = EngineLost(LOST)
                else:
                    stream.restart()
                    (self._queue if guilty is None else again).append(stream)
        return again, failed

    def go_on(self) -> None:
        """There is an engine: run the suspects that wait."""
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="quire-trials")

    def close(self) -> None:
        """Forget the suspects that wait."""
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._queue:
            stream = self._queue.popleft()
            if stream.opened.finished:
                continue
            self._on_trial = stream
            try:
                await self._send(stream.opened.request)
            except EngineError:  # lost again, before it could run
                self._on_trial = None
                self._queue.appendleft(stream)
                return
            await self._watch(stream)
            if stream.opened.finished:
                self.quarantine.acquit(stream.opened.request)
            self._on_trial = None

    async def _watch(self, stream: RequestStream) -> None:
        while not stream.opened.finished:
            first_s = stream.opened.metrics.first_token_s
            if first_s is not None and self._clock.now_s() - first_s > LINGER_S:
                return
            await asyncio.sleep(LOOK_S)
