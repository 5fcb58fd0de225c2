"""`RequestStream`: the outputs of one open request as an async iterator; `OpenStreams`: all that are open.

Owns what waits for a reader. Does not own what is sent to the engine (`async_llm.py`).
Invariant: it ends in exactly one of: a finished output, an exception, `aclose`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quire.core.commands import Command, Trial
from quire.core.errors import QueueFull, QuireError, RequestError, error_of, shown
from quire.core.events import FinishReason, SeqDelta
from quire.core.failure import Code
from quire.core.outputs import RequestOutput
from quire.core.sampling import OutputKind
from quire.engine.output_processor import OpenRequest, PartBuffer

REFUSALS = frozenset(
    {
        Code.OVERLOADED,
        Code.GRAMMARS_BUSY,
        Code.INVALID_PARAMETER,
        Code.INVALID_GRAMMAR,
        Code.QUEUE_TIMEOUT,
        Code.REQUEST_TIMEOUT,
    }
)
"""Ends that are exceptions for the reader, not outputs."""


class RequestStream:
    """See the module. Parts that pile up while nobody reads are joined."""

    def __init__(self, opened: OpenRequest, abort: Callable[[RequestStream], Awaitable[None]]) -> None:
        self.opened = opened
        """Its state; outputs are made of it."""
        self.is_delivered = False
        """True once its reader has got output: from then on it cannot be run again."""
        self.trial: Trial | None = None
        """How it runs, while an engine may have died of it."""
        self.n_restarts = 0
        self._abort = abort
        self._buffer = PartBuffer()
        self._is_behind = False
        """The last output left parts in the buffer."""
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
            if self._buffer and self._is_behind:
                await asyncio.sleep(0)  # much has piled up: others have their turn before the rest of it
            else:
                await self._arrived.wait()
            self._arrived.clear()
            if self._failure is not None:
                self._ended = True
                raise self._failure
            parts = self._buffer.take()
            self._is_behind = bool(self._buffer)
            self._ended = self._ended or (self.opened.finished and not self._is_behind)
            output = self.opened.output(parts, more=self._is_behind)
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
        failure = delta.failure
        if failure is not None and failure.code in REFUSALS:
            self.opened.end(FinishReason.ERROR, failure)
            self.fail(error_of(failure))
            return None
        kind = self.opened.request.params.output_kind
        parts, command = self.opened.take(delta, wants_parts=kind is not OutputKind.FINAL_ONLY)
        if kind is OutputKind.DELTA:
            for part in parts:
                self._buffer.put(part)
        if parts or self.opened.finished:
            self._arrived.set()
        return command

    def end(self, reason: FinishReason) -> None:
        """Finish without the engine; the reader gets a last output."""
        parts = self.opened.end(reason)
        if self.opened.request.params.output_kind is OutputKind.DELTA:
            for part in parts:
                self._buffer.put(part)
        self._arrived.set()

    def fail(self, error: QuireError) -> None:
        """The reader gets this error instead of more output."""
        self._failure = error
        self._arrived.set()

    def restart(self) -> None:
        """Forget all output, none of which was delivered: the request runs again from its prompt."""
        self.n_restarts += 1
        self.opened = self.opened.fresh()
        self._buffer, self._is_behind = PartBuffer(), False
        self._arrived.clear()


class OpenStreams:
    """The open requests of a process, found by the engine's id or by the caller's."""

    def __init__(self) -> None:
        self._streams: dict[str, RequestStream] = {}
        self._engine_ids: dict[str, str] = {}
        """The caller's id → the engine's."""
        self.n_seqs = 0
        """Sequences of all of them."""

    def __len__(self) -> int:
        return len(self._streams)

    def check(self, request_id: str | None, max_num_seqs: int, max_num_waiting: int) -> None:
        """Raises RequestError for the id of an open request, and QueueFull where another would be beyond slots and
        queue together: which sequences run only the engine knows."""
        if self.named(request_id) is not None:
            raise RequestError(
                f"request_id = {shown(request_id)} names an open request: choose another or abort that one",
                param="request_id",
                code=Code.DUPLICATE_REQUEST_ID,
            )
        if self.n_seqs >= max_num_seqs + max_num_waiting:
            raise QueueFull(
                f"{self.n_seqs} sequences are open, {max_num_seqs} can run and {max_num_waiting} wait: try again later"
            )

    def add(self, stream: RequestStream) -> None:
        """Take one in."""
        self._streams[stream.opened.request.request_id] = stream
        self._engine_ids[stream.request_id] = stream.opened.request.request_id
        self.n_seqs += stream.opened.request.params.n

    def forget(self, stream: RequestStream) -> bool:
        """Take one out; False if it was not in."""
        if self._streams.pop(stream.opened.request.request_id, None) is None:
            return False
        del self._engine_ids[stream.request_id]
        self.n_seqs -= stream.opened.request.params.n
        return True

    def get(self, engine_id: str) -> RequestStream | None:
        """By the engine's id."""
        return self._streams.get(engine_id)

    def named(self, request_id: str | None) -> RequestStream | None:
        """By the caller's exact id."""
        return self._streams.get(self._engine_ids.get(request_id or "", ""))

    def all(self) -> list[RequestStream]:
        """In the order in which they came."""
        return list(self._streams.values())
