"""`AsyncLLM`: an engine in its own process, for servers and asyncio programs. Names as vLLM users know them.

Owns the open requests of this process, also over the loss of an engine. Does not import torch.
Invariant: every submitted request ends in exactly one of: a finished output, an exception, `aclose`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
from collections.abc import AsyncIterator

from quire.config.engine import EngineConfig
from quire.core.errors import EngineDead, EngineError, EngineLost, InvalidParameter, QueueFull, RequestError, shown
from quire.core.events import (
    Cancel,
    Command,
    EngineReady,
    EngineStats,
    Event,
    Explain,
    Explained,
    Explanation,
    FinishReason,
    StepOutputs,
    Submit,
)
from quire.core.outputs import RequestOutput
from quire.core.request import Pooling, Request, Terms
from quire.core.sampling import SamplingParams
from quire.engine.frontend import Frontend, load_beside
from quire.engine.grammar_queue import GrammarQueue
from quire.engine.intake import Prompt
from quire.engine.link import EngineLink
from quire.engine.outflow import OpenRequest
from quire.engine.replay import Replay
from quire.engine.stream import RequestStream
from quire.engine.supervisor import ENGINE_COMMAND, EngineSupervisor

logger = logging.getLogger("quire.engine")

LONG_PROMPT_CHARS = 2048
"""Longer prompts are tokenized in a thread, off the event loop."""
EXPLAIN_S = 5.0
CLIENT_BITS = 40
"""Each client of an engine numbers its requests from its index times 2 to this power, lest they share seeds."""
CUT = "this process did not read what the engine sent, which has cancelled its requests: send the request again"


class AsyncLLM:
    """Serves requests through an engine process. Make one with `await AsyncLLM.create(EngineConfig(...))`."""

    def __init__(
        self, frontend: Frontend, client: EngineLink, supervisor: EngineSupervisor | None = None, client_index: int = 0
    ) -> None:
        """supervisor: of the engine, if this process started it; client_index: differs among the engine's clients."""
        self.config = frontend.config
        self.ready: EngineReady = frontend.ready
        self.tokenizer = frontend.tokenizer
        self.chat_template = frontend.chat_template
        self.model_name = frontend.model_name
        self.default_sampling = frontend.generation.sampling
        self.max_model_len = frontend.ready.max_model_len
        self.logits_width = frontend.ready.logits_width
        numbers = itertools.count(client_index << CLIENT_BITS)
        self._intake = dataclasses.replace(frontend.intake, counter=numbers)
        self._client = client
        self._grammars = GrammarQueue(self._intake)
        self._supervisor = supervisor
        self._replay = Replay(self._intake.clock, self._send)
        self._streams: dict[str, RequestStream] = {}
        """Open ones by the engine's id."""
        self._engine_ids: dict[str, str] = {}
        """The caller's id of each open request → the engine's."""
        self._n_open = 0
        """Sequences of open requests."""
        self._asked: dict[int, asyncio.Future[list[Explanation]]] = {}
        """Tickets of `explain` → what waits for the answers."""
        self._failure: str | None = None
        self._is_recovering = False
        self.n_engines_lost = 0
        self._stats = EngineStats()
        self._receiver = asyncio.create_task(self._receive(), name="quire-receiver")

    @classmethod
    async def create(cls, config: EngineConfig, engine_command: tuple[str, ...] = ENGINE_COMMAND) -> AsyncLLM:
        """Start an engine process and wait until it is loaded. Raises ConfigError or LoadError if it cannot be.

        engine_command: what Python runs instead of the engine's own module; for tests.
        """
        config.verify()
        supervisor = EngineSupervisor(config, engine_command)
        link = EngineLink(supervisor.address, config.engine_stall_timeout)
        try:
            _, frontend = await load_beside(supervisor.start(), config)
            ready = await link.wait_ready()
        except BaseException:
            link.close()
            await supervisor.close()
            raise
        return cls(frontend.attach(ready), link, supervisor)

    @classmethod
    async def connect(cls, config: EngineConfig, address: str, client_index: int) -> AsyncLLM:
        """Share the engine that another process supervises, once it is loaded. Raises ConfigError or LoadError if the
        tokenizer cannot be."""
        link = EngineLink(address, config.engine_stall_timeout)
        try:
            ready, frontend = await load_beside(link.wait_ready(), config)
        except BaseException:
            link.close()
            raise
        return cls(frontend.attach(ready), link, client_index=client_index)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        terms: Terms | None = None,
        pooling: Pooling | None = None,
    ) -> RequestStream:
        """Queue a request.

        request_id: the caller's name for it, unique among open requests; outputs carry it and `abort` takes it.
        terms: who it is for and its time limits; when one passes the reader gets RequestExpired.
        pooling: a vector of the prompt is wanted instead of tokens, with `pooling_params()`.
        Raises InvalidParameter, ContextLengthExceeded, QueueFull, RequestError (an open request has this id),
        RequestQuarantined (the engine died of it), EngineLost (try again) or EngineDead before anything starts.
        """
        if not isinstance(request_id, str | None) or request_id == "":
            raise InvalidParameter("request_id", request_id, "a non-empty string, or None")
        self._check_admission(request_id)
        if isinstance(prompt, str) and len(prompt) > LONG_PROMPT_CHARS and self.tokenizer is not None:
            token_ids: Prompt = await asyncio.to_thread(self._intake.encode, prompt)
        else:
            token_ids = prompt
        grammar = await self._grammars.checked(params) if params.structured_outputs is not None else ""
        request = self._intake.request(
            token_ids, params, priority=priority, cache_salt=cache_salt, grammar=grammar, pooling=pooling
        )
        request.terms = terms or request.terms
        request.label = request_id or ""
        self._check_admission(request_id)  # others may have come meanwhile
        text = prompt if isinstance(prompt, str) else None
        opened = OpenRequest(request, text, self.tokenizer, self._intake.clock, request_id)
        stream = RequestStream(opened, self.abort_stream)
        self._streams[request.request_id] = stream
        self._engine_ids[stream.request_id] = request.request_id
        self._n_open += params.n
        try:
            await self._replay.begin(stream)
        except (EngineError, RequestError):
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
            with contextlib.suppress(EngineError):  # without an engine there is nothing to cancel
                await self._client.send(Cancel([stream.opened.request.request_id]))

    @property
    def n_open(self) -> int:
        """Sequences of this process's open requests, whether they run or wait."""
        return self._n_open

    async def explain(self, label: str) -> list[Explanation]:
        """Where the time went of the requests whose ids are `label`, a hyphen and more; empty if none is remembered.

        Raises EngineLost or EngineDead without an engine, TimeoutError if it does not answer.
        """
        ticket = secrets.randbits(62)
        asked = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self._client.send(Explain(ticket, label))
            async with asyncio.timeout(EXPLAIN_S):
                return await asked
        finally:
            self._asked.pop(ticket, None)

    def stats(self) -> EngineStats:
        """Latest snapshot, at most about a second old while the engine is healthy."""
        return self._stats

    def healthy(self) -> bool:
        """True while the engine process lives and its scheduler makes progress."""
        return self._client.healthy() and not self._receiver.done()

    def failure(self) -> str | None:
        """Why the engine is gone; None while it lives, also when it makes no progress."""
        final = self._supervisor.failure if self._supervisor is not None else None
        return final or self._failure

    async def shutdown(self) -> None:
        """Stop the engine process; open requests fail with EngineDead."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._fail_all("the engine was shut down")
        self._replay.close()
        self._grammars.close()
        if self._supervisor is not None:
            await self._supervisor.shutdown()
        self._client.close()

    def _check_admission(self, request_id: str | None) -> None:
        """Refuse what cannot be taken now. The engine's own limit counts sequences that wait; here, where it is not
        known which of the open ones run, only what exceeds slots and queue together is certain not to fit."""
        failure = self.failure()
        if failure is not None:
            raise EngineDead(failure)
        if self._is_recovering:
            raise EngineLost("the engine is being started again: try again later")
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

    async def _send(self, request: Request) -> None:
        await self._client.send(Submit(request))

    async def _receive(self) -> None:
        try:
            while True:
                try:
                    await self._client.receive_all(self._take, self._hear)
                except EngineLost:
                    await self._recover()
        except EngineDead as error:
            self._fail_all(error.message)
        except Exception:
            logger.exception("reading the engine's messages failed")
            self._fail_all("the engine's messages could not be read; see the log")

    async def _recover(self) -> None:
        """Sort out the open requests, wait for the next engine, run those again that can. EngineDead if none comes."""
        self.n_engines_lost += 1
        self._is_recovering = True
        supervisor = self._supervisor
        final = await supervisor.verdict() if supervisor is not None else None
        if final is not None:
            raise EngineDead(final)
        again, failed = self._replay.sort_out(list(self._streams.values()))
        for stream, error in failed.items():
            self._forget(stream)
            stream.fail(error)
        tasks = [asyncio.ensure_future(self._client.wait_ready())]
        if supervisor is not None:
            tasks.append(asyncio.ensure_future(supervisor.ended.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if supervisor is not None and supervisor.failure is not None:
                raise EngineDead(supervisor.failure)
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
        self._is_recovering = False
        for stream in again:
            if not stream.opened.finished:
                await self._send(stream.opened.request)
        self._replay.go_on()

    def _hear(self, event: Event) -> None:
        """Anything but outputs: the answer to `explain`, or the news that the engine has cancelled what was open."""
        if isinstance(event, Explained):
            asked = self._asked.pop(event.ticket, None)
            if asked is not None and not asked.done():
                asked.set_result(event.found)
            return
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.fail(EngineLost(CUT))

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
