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
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from quire.config.engine import EngineConfig
from quire.core.adapters import LoRARequest
from quire.core.beams import BeamTerms
from quire.core.commands import Cancel, Command
from quire.core.errors import (
    EngineAsleep,
    EngineDead,
    EngineError,
    EngineLost,
    InvalidParameter,
    QuireError,
    RequestError,
)
from quire.core.events import (
    Done,
    EngineReady,
    EngineStats,
    Event,
    Explained,
    Explanation,
    FinishReason,
    RequestsLost,
    StepOutputs,
)
from quire.core.outputs import RequestOutput
from quire.core.request import Pooling, Terms
from quire.core.sampling import SamplingParams
from quire.engine.expectations import Expectations
from quire.engine.frontend import Frontend, load_beside
from quire.engine.input_processor import Checked, InputProcessor, Prompt
from quire.engine.link import CUT, EngineLink, Link
from quire.engine.orders import Orders
from quire.engine.output_processor import OpenRequest
from quire.engine.questions import Questions
from quire.engine.recovery import Recovery
from quire.engine.sleep import ASLEEP
from quire.engine.speed import Speed
from quire.engine.stream import OpenStreams, RequestStream
from quire.engine.supervisor import ENGINE_COMMAND, EngineSupervisor

logger = logging.getLogger("quire.engine")

LONG_PROMPT_CHARS = 2048
"""Longer prompts are tokenized in a thread, off the event loop."""
LONG_PROMPT_IDS = 16_384
"""Longer lists of token ids are checked in a thread."""
CLIENT_BITS = 40
"""Each client of an engine numbers its requests from its index times 2 to this power, lest they share seeds."""


async def _encoded(input_processor: InputProcessor, prompt: Prompt) -> list[int]:
    """Its token ids, checked; those of a long prompt off the event loop."""
    is_text = isinstance(prompt, str)
    if isinstance(prompt, str | list) and len(prompt) > (LONG_PROMPT_CHARS if is_text else LONG_PROMPT_IDS):
        return await asyncio.to_thread(input_processor.encode, prompt)
    return input_processor.encode(prompt)


class AsyncLLM(Orders):
    """Serves requests through an engine process. Make one with `await AsyncLLM.create(EngineConfig(...))`."""

    def __init__(
        self, frontend: Frontend, client: Link, supervisor: EngineSupervisor | None = None, client_index: int = 0
    ) -> None:
        """supervisor: of the engine, if this process started it; client_index: differs among the engine's clients."""
        self.config, self.expectations = frontend.config, Expectations(frontend)
        self.ready: EngineReady = frontend.ready
        self.tokenizer = frontend.tokenizer
        self.chat_template = frontend.chat_template
        self.model_name = frontend.model_name
        self.default_sampling = frontend.generation.sampling
        self.max_model_len = frontend.ready.max_model_len
        self.logits_width = frontend.ready.logits_width
        numbers = itertools.count(client_index << CLIENT_BITS)
        self._input_processor = dataclasses.replace(frontend.input_processor, counter=numbers)
        self._client = client
        self._supervisor = supervisor
        self._recovery = Recovery(self._input_processor.clock, client.send, self._fail)
        self._recovery.quarantine.learn(frontend.ready.ends)
        self._streams = OpenStreams()
        self._questions = Questions(client.send)
        self._engine = frontend.ready.engine
        """Number of the engine that has the open requests."""
        self._failure: str | None = None
        self.is_recovering = False
        """The engine was lost, and another one is being started."""
        self.n_engines_lost = 0
        self._stats = EngineStats()
        self.speed = Speed(time.monotonic())
        self._receiver = asyncio.create_task(self._receive(), name="quire-receiver")

    @classmethod
    async def create(cls, config: EngineConfig, engine_command: tuple[str, ...] = ENGINE_COMMAND) -> AsyncLLM:
        """Start an engine process and wait until it is loaded. Raises ConfigError or LoadError if it cannot be,
        EngineError if it died. engine_command: what Python runs instead of the engine's own module; for tests."""
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
        """Share the engine that another process supervises, once it is loaded. Raises as `over`."""
        return await cls.over(config, EngineLink(address, config.engine_stall_timeout), client_index)

    @classmethod
    async def over(cls, config: EngineConfig, link: Link, client_index: int) -> AsyncLLM:
        """What `link` leads to, once it is loaded. Raises ConfigError or LoadError if the tokenizer cannot be."""
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
        beams: BeamTerms | None = None,
        adapter: str = "",
        checked: Checked | None = None,
    ) -> RequestStream:
        """Queue a request.

        request_id: the caller's name for it, unique among open requests; outputs carry it and `abort` takes it.
        terms: who it is for and its time limits; when one passes the reader gets RequestExpired.
        pooling: a vector of the prompt is wanted instead of tokens, with `pooling_params()`.
        beams: the tokens are to be found by a beam search; they come whole, at its end.
        adapter: name of one that is loaded; empty: the model itself.
        checked: what `check` gave for these very parameters, which did not change since.
        Raises InvalidParameter, ContextLengthExceeded, QueueFull, RequestError (an open request has this id),
        RequestQuarantined (the engine died of it), EngineLost (try again) or EngineDead before anything starts.
        """
        if not isinstance(request_id, str | None) or request_id == "":
            raise InvalidParameter("request_id", request_id, "a non-empty string, or None")
        self._check_admission(request_id)
        token_ids = await _encoded(self._input_processor, prompt)
        checked = checked or await self.check(params)
        request = self._input_processor.request(
            prompt, params, priority=priority, cache_salt=cache_salt, pooling=pooling, beams=beams,
            checked=checked, token_ids=token_ids,
        )  # fmt: skip
        request.terms = terms or request.terms
        request.label, request.adapter = request_id or "", adapter
        self._check_admission(request_id)  # others may have come meanwhile
        text = prompt if isinstance(prompt, str) else None
        opened = OpenRequest(request, text, self.tokenizer, self._input_processor.clock, request_id)
        stream = RequestStream(opened, self.abort_stream)
        self._streams.add(stream)
        try:
            await self._recovery.begin(stream)
        except (EngineError, RequestError):
            self._streams.forget(stream)
            raise
        return stream

    async def check(self, params: SamplingParams) -> Checked:
        """Check parameters once for many prompts. Raises what `submit` raises because of them."""
        if params.bad_words or params.structured_outputs is not None:
            return await asyncio.to_thread(self._input_processor.check, params)
        return self._input_processor.check(params)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`submit` as an async generator; leaving it early cancels the request. lora_request: one that is loaded."""
        adapter = "" if lora_request is None else lora_request.lora_name
        stream = await self.submit(
            prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt, adapter=adapter
        )
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        """Cancel by the caller's exact id; unknown or finished ids are ignored. Its reader gets a last output, whose
        open completions have finish_reason "abort"."""
        stream = self._streams.named(request_id)
        if stream is not None:
            await self.abort_stream(stream)

    async def abort_stream(self, stream: RequestStream) -> None:
        """Cancel this very request, if it is open."""
        await self.abort_streams((stream,))

    async def abort_streams(self, streams: Iterable[RequestStream]) -> None:
        """Cancel these requests, as far as they are open."""
        open_ones = [stream for stream in streams if self._streams.forget(stream)]
        for stream in open_ones:
            stream.end(FinishReason.ABORT)
        if open_ones:
            with contextlib.suppress(EngineError):  # without an engine there is nothing to cancel
                await self._client.send(Cancel([stream.opened.request.request_id for stream in open_ones]))

    @property
    def n_open(self) -> int:
        """Sequences of this process's open requests, whether they run or wait."""
        return self._streams.n_seqs

    async def explain(self, label: str) -> list[Explanation]:
        """Where the time went of the requests whose ids are `label`, a hyphen and more; empty if none is remembered.
        Raises EngineLost or EngineDead without an engine, TimeoutError if it does not answer."""
        return await self._questions.explain(label)

    def stats(self) -> EngineStats:
        """Latest snapshot, about a second old at most while the engine is healthy."""
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
        if self._supervisor is not None:
            await self._supervisor.shutdown()
        self._client.close()

    def _check_admission(self, request_id: str | None) -> None:
        """Refuse what is certain not to be taken now."""
        failure = self.failure()
        if failure is not None:
            raise EngineDead(failure)
        if self.is_recovering:
            raise EngineLost("the engine is being started again: try again later")
        if self._stats.is_asleep:
            raise EngineAsleep(ASLEEP)
        self._streams.check(request_id, self.ready.max_num_seqs, self.config.max_num_waiting)

    def _fail(self, stream: RequestStream, error: QuireError) -> None:
        self._streams.forget(stream)
        stream.fail(error)

    async def _receive(self) -> None:
        try:
            while True:
                try:
                    if self.is_recovering:
                        await self._recover()
                    else:
                        await self._client.receive_all(self._take, self._hear)
                except EngineLost as lost:
                    self._questions.fail(lost)
                    self._stats = EngineStats()
                    self.n_engines_lost += 1
                    self.is_recovering = True
        except EngineDead as error:
            self._fail_all(error.message)
        except Exception:
            logger.exception("reading the engine's messages failed")
            self._fail_all("the engine's messages could not be read; see the log")

    async def _recover(self) -> None:
        """Wait for the next engine, run the open requests again that can. EngineDead if none comes, else EngineLost."""
        supervisor = self._supervisor
        final = await supervisor.verdict() if supervisor is not None else None
        if final is not None:
            raise EngineDead(final)
        self._recovery.fail_delivered(self._streams.all())
        waiting = asyncio.ensure_future(self._client.wait_ready())
        tasks: list[asyncio.Future[Any]] = [waiting]
        if supervisor is not None:
            tasks.append(asyncio.ensure_future(supervisor.ended.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if supervisor is not None and supervisor.failure is not None:
                raise EngineDead(supervisor.failure)
            ready = waiting.result()
        finally:
            for task in tasks:
                task.cancel()
        before, self._engine = self._engine, ready.engine
        await self._recovery.run_again(self._streams.all(), before, ready)
        self.is_recovering = False

    def _hear(self, event: Event) -> list[Command]:
        """Anything but outputs."""
        match event:
            case Explained() | Done():
                self._questions.answer(event)
            case EngineReady():  # one of several engines has come or gone
                self.ready, self.n_engines_lost = event, event.engine
            case RequestsLost(request_ids, reason):
                return [*self._recovery.run_elsewhere(map(self._streams.get, request_ids), reason)]
            case _:
                for stream in self._streams.all():
                    self._fail(stream, EngineLost(CUT))
        return []

    def _take(self, outputs: StepOutputs) -> list[Command]:
        if outputs.stats is not None:
            self._stats = outputs.stats
            self.speed.read(outputs.stats.generation_tokens, time.monotonic())
        commands: list[Command] = []
        for delta in outputs.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            command = stream.take(delta)
            if command is not None:
                commands.append(command)
            if stream.trial is not None:
                self._recovery.follow(stream)
            if stream.opened.finished:
                self._streams.forget(stream)
        return commands

    def _fail_all(self, message: str) -> None:
        """No stream can go on, and no request will be taken any more."""
        self._failure = message
        self._questions.fail(EngineDead(message))
        for stream in self._streams.all():
            self._fail(stream, EngineDead(message))
