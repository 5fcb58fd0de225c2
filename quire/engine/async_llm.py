"""`AsyncLLM`: an engine in its own process, for servers and asyncio programs. Names as vLLM users know them.

Owns the open requests of this process. Does not import torch.
Invariant: every submitted request ends in exactly one of: a finished output, an exception, `aclose`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from quire.config.engine import EngineConfig
from quire.core.errors import EngineDead, QueueFull
from quire.core.events import Cancel, CancelSeq, Command, EngineReady, EngineStats, StepOutputs, Submit
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.frontend import Frontend
from quire.engine.intake import Prompt
from quire.engine.outflow import OpenRequest
from quire.engine.process_client import ProcessClient

LONG_PROMPT_CHARS = 2048
"""Longer prompts are tokenized in a thread, off the event loop."""


class RequestStream:
    """The outputs of one request, as an async iterator. Parts that pile up while nobody reads are joined."""

    def __init__(self, llm: AsyncLLM, opened: OpenRequest) -> None:
        self._llm = llm
        self._opened = opened
        self._parts: dict[int, CompletionOutput] = {}
        self._arrived = asyncio.Event()
        self._failure: str | None = None
        self._ended = False

    @property
    def request_id(self) -> str:
        return self._opened.request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._opened.request.prompt_token_ids

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Next output. Raises EngineDead if the engine is lost, StopAsyncIteration after the last one."""
        while not self._ended:
            await self._arrived.wait()
            if self._failure is not None:
                self._ended = True
                raise EngineDead(self._failure)
            self._arrived.clear()
            parts, self._parts = self._parts, {}
            self._ended = self._opened.finished
            output = self._opened.output(list(parts.values()))
            if output is not None:
                return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request if it still runs (idempotent)."""
        self._ended = True
        await self._llm.abort(self.request_id)

    def put(self, part: CompletionOutput) -> None:
        """Add a new part of a completion."""
        waiting = self._parts.get(part.index)
        if waiting is not None:
            part.text = waiting.text + part.text
            part.token_ids = waiting.token_ids + part.token_ids
            if part.logprobs is not None:
                part.logprobs = (waiting.logprobs or []) + part.logprobs
        self._parts[part.index] = part
        self._arrived.set()

    def fail(self, message: str) -> None:
        """The engine is gone."""
        self._failure = message
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
        self._streams: dict[str, tuple[OpenRequest, RequestStream]] = {}
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
        """Queue a request. Raises InvalidParameter, ContextLengthExceeded, QueueFull or EngineDead before it starts."""
        if len(self._streams) >= self.config.max_num_waiting:
            raise QueueFull(
                f"{len(self._streams)} requests are open, the limit is {self.config.max_num_waiting}: try again later"
            )
        if isinstance(prompt, str) and len(prompt) > LONG_PROMPT_CHARS and self.tokenizer is not None:
            token_ids: Prompt = await asyncio.to_thread(self._intake.encode, prompt)
        else:
            token_ids = self._intake.encode(prompt)
        request = self._intake.request(
            token_ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        opened = OpenRequest(request, prompt if isinstance(prompt, str) else None, self.tokenizer, self._intake.clock)
        stream = RequestStream(self, opened)
        self._streams[request.request_id] = (opened, stream)
        try:
            await self._client.send(Submit(request))
        except EngineDead:
            self._streams.pop(request.request_id, None)
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
        """Cancel by exact id; unknown or finished ids are ignored."""
        if self._streams.pop(request_id, None) is not None and self._client.healthy():
            await self._client.send(Cancel([request_id]))

    def stats(self) -> EngineStats:
        """Latest snapshot, at most about a second old while the engine is healthy."""
        return self._stats

    def healthy(self) -> bool:
        """True while the engine process lives and its scheduler makes progress."""
        return self._client.healthy() and not self._receiver.done()

    def failure(self) -> str | None:
        """Why the engine is gone; None while it lives, also when it makes no progress."""
        return self._client.failure

    async def shutdown(self) -> None:
        """Stop the engine process; open requests fail with EngineDead."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._fail_all("the engine was shut down")
        await self._client.shutdown()

    async def _receive(self) -> None:
        try:
            await self._client.receive_all(self._take)
        except EngineDead as error:
            self._fail_all(error.message)

    def _take(self, outputs: StepOutputs) -> list[Command]:
        if outputs.stats is not None:
            self._stats = outputs.stats
        commands: list[Command] = []
        for delta in outputs.deltas:
            entry = self._streams.get(delta.request_id)
            if entry is None:
                continue
            opened, stream = entry
            part, stop_now = opened.take(delta)
            if part is not None:
                stream.put(part)
            if stop_now:
                commands.append(CancelSeq(delta.request_id, delta.index))
            if opened.finished:
                del self._streams[delta.request_id]
        return commands

    def _fail_all(self, message: str) -> None:
        for _, stream in self._streams.values():
            stream.fail(message)
        self._streams.clear()
