"""`AsyncLLM`: an engine in its own process, for servers and asyncio programs. Names as vLLM users know them.

Owns the open requests of this process. Does not import torch.
Invariant: every submitted request ends in exactly one of: a finished output, an exception, `aclose`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from quire.config.engine import EngineConfig
from quire.core.errors import EngineDead, InvalidParameter, QueueFull, QuireError, RequestError, shown
from quire.core.events import (
    Cancel,
    Command,
    EngineReady,
    EngineStats,
    FinishReason,
    SeqDelta,
    StepOutputs,
    Submit,
)
from quire.core.outputs import RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.frontend import Frontend
from quire.engine.intake import Prompt
from quire.engine.outflow import OpenRequest, PartBuffer
from quire.engine.process_client import ProcessClient

logger = logging.getLogger("quire.engine")

LONG_PROMPT_CHARS = 2048
"""Longer prompts are tokenized in a thread, off the event loop."""


class RequestStream:
    """The outputs of one request, as an async iterator. Parts that pile up while nobody reads are joined."""

    def __init__(self, llm: AsyncLLM, opened: OpenRequest) -> None:
        self._llm = llm
        self.opened = opened
        """Its state; outputs are made of it."""
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
        """Next output. StopAsyncIteration after the last one; EngineDead if the engine is lost; QueueFull if the engine
        had no room for the request after all."""
        while not self._ended:
            await self._arrived.wait()
            self._arrived.clear()
            if self._failure is not None:
                self._ended = True
                raise self._failure
            self._ended = self._ended or self.opened.finished
            output = self.opened.output(self._buffer.take())
            if output is not None:
                return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request if it still runs (idempotent)."""
        await self._llm.abort_stream(self)
        self._ended = True

    def take(self, delta: SeqDelta) -> Command | None:
        """Show a delta to the reader. Returns what the engine must be told."""
        refusal = f"{QueueFull.code}: "
        if delta.error is not None and delta.error.startswith(refusal):
            self.opened.end(FinishReason.ERROR, delta.error)
            self.fail(QueueFull(delta.error.removeprefix(refusal)))
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


class AsyncLLM:
    """Serves requests through an engine process. Make one with `await AsyncLLM.create(EngineConfig(...))`."""

    def __init__(self, frontend: Frontend, client: ProcessClient) -> None:
        self.config = frontend.config
        self.ready: EngineReady = frontend.ready
        self.tokenizer = frontend.tokenizer
        self.chat_template = frontend.chat_template
        self.model_name = frontend.model_name
        self.default_sampling = frontend.generation.sampling
        self.max_model_len = frontend.ready.max_model_len
        self.logits_width = frontend.ready.logits_width
        self._intake = frontend.intake
        self._client = client
        self._streams: dict[str, RequestStream] = {}
        """Open ones by the engine's id."""
        self._engine_ids: dict[str, str] = {}
        """The caller's id of each open request → the engine's."""
        self._n_open = 0
        """Sequences of open requests."""
        self._failure: str | None = None
        self._stats = EngineStats()
        self._receiver = asyncio.create_task(self._receive(), name="quire-receiver")

    @classmethod
    async def create(cls, config: EngineConfig) -> AsyncLLM:
        """Start an engine process and wait until it is loaded. Raises ConfigError or LoadError if it cannot be."""
        config.verify()
        client = ProcessClient(config)
        try:
            ready, frontend = await asyncio.gather(client.wait_ready(), asyncio.to_thread(Frontend.load, config))
        except BaseException:
            client.close()
            raise
        return cls(frontend.attach(ready), client)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Queue a request.

        request_id: the caller's name for it, unique among open requests; outputs carry it and `abort` takes it.
        Raises InvalidParameter, ContextLengthExceeded, QueueFull, RequestError (an open request has this id) or
        EngineDead before anything starts.
        """
        if not isinstance(request_id, str | None) or request_id == "":
            raise InvalidParameter("request_id", request_id, "a non-empty string, or None")
        self._check_admission(request_id)
        if isinstance(prompt, str) and len(prompt) > LONG_PROMPT_CHARS and self.tokenizer is not None:
            token_ids: Prompt = await asyncio.to_thread(self._intake.encode, prompt)
        else:
            token_ids = prompt
        request = self._intake.request(token_ids, params, priority=priority, cache_salt=cache_salt)
        self._check_admission(request_id)  # others may have come meanwhile
        text = prompt if isinstance(prompt, str) else None
        stream = RequestStream(self, OpenRequest(request, text, self.tokenizer, self._intake.clock, request_id))
        self._streams[request.request_id] = stream
        self._engine_ids[stream.request_id] = request.request_id
        self._n_open += params.n
        try:
            await self._client.send(Submit(request))
        except EngineDead:
            self._forget(stream)
            raise
        return stream

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """`submit` as an async generator; leaving it early cancels the request."""
        stream = await self.submit(
            prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        """Cancel by the caller's exact id; unknown or finished ids are ignored.

        Its reader gets a last output whose open completions have finish_reason "abort".
        """
        stream = self._streams.get(self._engine_ids.get(request_id, ""))
        if stream is not None:
            await self.abort_stream(stream)

    async def abort_stream(self, stream: RequestStream) -> None:
        """Cancel this very request, if it is open."""
        if self._forget(stream):
            stream.end(FinishReason.ABORT)
            if self._client.healthy():
                await self._client.send(Cancel([stream.opened.request.request_id]))

    def stats(self) -> EngineStats:
        """Latest snapshot, at most about a second old while the engine is healthy."""
        return self._stats

    def healthy(self) -> bool:
        """True while the engine process lives and its scheduler makes progress."""
        return self._client.healthy() and not self._receiver.done()

    def failure(self) -> str | None:
        """Why the engine is gone; None while it lives, also when it makes no progress."""
        return self._client.failure or self._failure

    async def shutdown(self) -> None:
        """Stop the engine process; open requests fail with EngineDead."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._fail_all("the engine was shut down")
        await self._client.shutdown()

    def _check_admission(self, request_id: str | None) -> None:
        """Refuse what cannot be taken now. The engine's own limit counts sequences that wait; here, where it is not
        known which of the open ones run, only what exceeds slots and queue together is certain not to fit."""
        failure = self.failure()
        if failure is not None:
            raise EngineDead(failure)
        if request_id in self._engine_ids:
            raise RequestError(
                f"request_id = {shown(request_id)} names an open request: choose another or abort that one",
                param="request_id",
                code="duplicate_request_id",
            )
        limit = self.ready.max_num_seqs + self.config.max_num_waiting
        if self._n_open >= limit:
            raise QueueFull(
                f"{self._n_open} sequences are open, {self.ready.max_num_seqs} can run and "
                f"{self.config.max_num_waiting} wait: try again later"
            )

    def _forget(self, stream: RequestStream) -> bool:
        """Take it out of the books; False if it was not in them."""
        if self._streams.pop(stream.opened.request.request_id, None) is None:
            return False
        del self._engine_ids[stream.request_id]
        self._n_open -= stream.opened.request.params.n
        return True

    async def _receive(self) -> None:
        try:
            await self._client.receive_all(self._take)
        except EngineDead as error:
            self._fail_all(error.message)
        except Exception:
            logger.exception("reading the engine's messages failed")
            self._fail_all("the engine's messages could not be read; see the log")

    def _take(self, outputs: StepOutputs) -> list[Command]:
        if outputs.stats is not None:
            self._stats = outputs.stats
        commands: list[Command] = []
        for delta in outputs.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            command = stream.take(delta)
            if command is not None:
                commands.append(command)
            if stream.opened.finished:
                self._forget(stream)
        return commands

    def _fail_all(self, message: str) -> None:
        """No stream can go on, and no request will be taken any more."""
        self._failure = message
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.fail(EngineDead(message))
