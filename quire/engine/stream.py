"""`RequestStream`: the outputs of one open request as an async iterator.

Owns what waits for its reader. Does not own the books of open requests (`async_llm.py`).
Invariant: it ends in exactly one of: a finished output, an exception, `aclose`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quire.core.errors import QueueFull, QuireError, RequestExpired
from quire.core.events import Command, FinishReason, SeqDelta
from quire.core.outputs import RequestOutput
from quire.engine.outflow import OpenRequest, PartBuffer

REFUSALS: dict[str, type[QuireError]] = {
    QueueFull.code: QueueFull,
    "queue_timeout": RequestExpired,
    "request_timeout": RequestExpired,
}
"""Codes of ends that are exceptions for the reader, not outputs."""


class RequestStream:
    """See the module. Parts that pile up while nobody reads are joined."""

    def __init__(self, opened: OpenRequest, abort: Callable[[RequestStream], Awaitable[None]]) -> None:
        self.opened = opened
        """Its state; outputs are made of it."""
        self.is_delivered = False
        """True once its reader has got output: from then on it cannot be run again."""
        self._abort = abort
        self._buffer = PartBuffer()
        self._arrived = asyncio.Event()
        self._failure: QuireError | None = None
        self._ended = False

    @property
    def request_id(self) -> str:
        """The caller's id, or the engine's if the caller gave none."""
        return self.opened.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.opened.request.prompt_token_ids

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Next output. StopAsyncIteration after the last one; EngineLost or EngineDead if the engine is lost; QueueFull
        or RequestExpired if the engine had no room or no time for the request after all."""
        while not self._ended:
            await self._arrived.wait()
            self._arrived.clear()
            if self._failure is not None:
                self._ended = True
                raise self._failure
            self._ended = self._ended or self.opened.finished
            output = self.opened.output(self._buffer.take())
            if output is not None:
                self.is_delivered = True
                return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request if it still runs (idempotent)."""
        await self._abort(self)
        self._ended = True

    def take(self, delta: SeqDelta) -> Command | None:
        """Show a delta to the reader. Returns what the engine must be told."""
        if delta.error is not None:
            code, _, text = delta.error.partition(": ")
            if code in REFUSALS:
                self.opened.end(FinishReason.ERROR, delta.error)
                self.fail(REFUSALS[code](text, code=code))
                return None
        parts, command = self.opened.take(delta)
        for part in parts:
            self._buffer.put(part)
        if parts:
            self._arrived.set()
        return command

    def end(self, reason: FinishReason) -> None:
        """Finish without the engine; the reader gets a last output."""
        for part in self.opened.end(reason):
            self._buffer.put(part)
        self._arrived.set()

    def fail(self, error: QuireError) -> None:
        """The reader gets this error instead of more output."""
        self._failure = error
        self._arrived.set()

    def restart(self) -> None:
        """Forget all output, none of which was delivered: the request runs again from its prompt."""
        self.opened = self.opened.fresh()
        self._buffer = PartBuffer()
        self._arrived.clear()
