"""Carrying out one answer while its client may leave, stop reading, or have to be told that we shut down.

`ExchangeTask.run(work)` runs the work of an exchange and watches the connection beside it; `EventStreamWriter` writes
an event stream. Owns cancelling. Does not own what is computed or how events look.
Invariants: work never outlives its client; memory held for a client that does not read is bounded; silence is filled
with comments, so that proxies keep the stream open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from quire.serve.config import ServerConfig
from quire.serve.http.answers import AnswerMaker
from quire.serve.http.exchange import ClientGone, Exchange

T = TypeVar("T")

MAX_WAITING_BYTES = 256 * 1024
"""Frames of other sequences that wait while one write is under way; their producers wait beyond it."""
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]


class EventStreamWriter:
    """The event stream of one exchange. The first `put` sends the headers: an earlier error is a plain answer."""

    def __init__(self, exchange: Exchange, answers: AnswerMaker) -> None:
        self._exchange = exchange
        self._answers = answers
        self._now_s = asyncio.get_running_loop().time
        self._waiting = bytearray()
        self._room = asyncio.Event()
        self.writing_since_s: float | None = None
        """When the write that is under way began."""
        self.last_write_s = self._now_s()

    async def put(self, frames: bytes) -> None:
        """Write `frames`. When another task is writing already they are left to it, joined into one write."""
        if self.writing_since_s is not None:
            self._waiting += frames
            while len(self._waiting) > MAX_WAITING_BYTES:
                self._room.clear()
                await self._room.wait()
            return
        self.writing_since_s = self._now_s()
        try:
            await self._write(frames)
            await self._write_waiting()
        finally:
            self.writing_since_s = None

    async def put_pieces(self, pieces: Iterator[bytes]) -> None:
        """Write frames that are laid out on the way; nothing else comes between. Only for an answer of one sequence:
        no other task may be writing."""
        self.writing_since_s = self._now_s()
        try:
            async for data in self._answers.slices(pieces):
                await self._write(data)
            await self._write_waiting()
        finally:
            self.writing_since_s = None

    async def finish(self, frames: bytes | Iterator[bytes]) -> None:
        """Write the last frames and end the answer."""
        await (self.put(frames) if isinstance(frames, bytes) else self.put_pieces(frames))
        await self._exchange.write(b"", more=False)

    async def _write(self, frames: bytes) -> None:
        if not self._exchange.started:
            await self._exchange.start(200, self._exchange.dialect.stream_media, _STREAM_HEADERS)
        await self._exchange.write(frames)
        self.writing_since_s = self.last_write_s = self._now_s()

    async def _write_waiting(self) -> None:
        while self._waiting:
            frames = bytes(self._waiting)
            self._waiting.clear()
            self._room.set()
            await self._write(frames)


class ExchangeTask:
    """Runs the work of one exchange; ends it when the client leaves, stalls, or `stop` is called."""

    def __init__(self, exchange: Exchange, config: ServerConfig, writer: EventStreamWriter | None = None) -> None:
        self._exchange = exchange
        self._config = config
        self._writer = writer
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reason: Exception = ClientGone()

    def stop(self, reason: Exception) -> None:
        """End the work; `run` raises `reason`."""
        if not self._ended.done():
            self._reason = reason
            self._ended.set_result(None)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`. Raises what it raises, ClientGone, or the reason given to `stop`."""
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(self._watch())
        watcher.add_done_callback(self._end_with)
        try:
            await asyncio.wait((task, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await _cancelled(task)
                raise self._reason
            return task.result()
        finally:
            self._ended.cancel()
            watcher.cancel()
            if not task.done():
                await _cancelled(task)

    def _end_with(self, watcher: asyncio.Task[None]) -> None:
        """A watcher that fails ends the work, which nobody would watch any more."""
        error = None if watcher.cancelled() else watcher.exception()
        if isinstance(error, Exception):
            self.stop(error)

    async def _watch(self) -> None:
        while not self._ended.done():
            try:
                async with asyncio.timeout_at(self._due_s()):
                    message = await self._exchange.receive()
            except TimeoutError:
                await self._tick()
            else:
                if message["type"] == "http.disconnect":
                    self.stop(ClientGone())

    def _due_s(self) -> float | None:
        """When `_tick` has something to do."""
        writer = self._writer
        if writer is None:
            return None
        if writer.writing_since_s is not None:
            return writer.writing_since_s + self._config.write_timeout
        return writer.last_write_s + self._config.sse_keep_alive

    async def _tick(self) -> None:
        writer = self._writer
        due_s = self._due_s()
        if writer is None or due_s is None or due_s > asyncio.get_running_loop().time():
            return
        stalled, silence = writer.writing_since_s is not None, self._exchange.silence
        if not stalled:
            try:
                async with asyncio.timeout(self._config.write_timeout):
                    await writer.put(self._exchange.dialect.silence if silence is None else silence())
            except TimeoutError:
                stalled = True
        if stalled:
            await self._exchange.abort()
            self.stop(ClientGone())


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; what it raises meanwhile no longer matters."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
