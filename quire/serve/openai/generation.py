"""Running the sequences of one HTTP request: submit every prompt, then collect the results or turn them into events.

Shared by every generating endpoint. Owns submission, cancelling, metrics and usage; does not own the shape of answers.
Invariants: prompts are submitted all or none; every stream is closed whatever happens; a choice that ended with `error`
or `abort` fails the whole request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from quire.core.beams import BeamTerms
from quire.core.errors import QuireError, RequestError, error_of, shown
from quire.core.failure import Failure
from quire.core.outputs import RequestOutput
from quire.core.request import Pooling, Terms
from quire.core.sampling import SamplingParams
from quire.engine.stream import RequestStream
from quire.serve.http.delivery import EventStreamWriter, ExchangeTask
from quire.serve.http.exchange import Exchange
from quire.serve.http.json_pieces import encoded
from quire.serve.http.refusal import Refusal, internal_error, unavailable
from quire.serve.openai.schema import JsonObject
from quire.serve.ops.traces import RequestTrace
from quire.serve.state import ServerState
from quire.text.message import MessageReader
from quire.text.reasoning_count import CountsReasoning

logger = logging.getLogger("quire.serve")

TURN_S = 0.005
"""How long submitting the prompts of one request keeps the event loop from others."""
BACKGROUND_PRIORITY = 2**31 - 1
"""Behind everything that a client may ask for."""

SMALL_CELLS = 4096
"""Tokens and values of an answer that is laid out at once: that takes a millisecond or two."""
CHOICE_CELLS = 8
"""What a choice costs beside its tokens."""

Frames = bytes | Iterator[bytes]
"""Events; as pieces where they are many."""
FrameSource = Callable[[int, RequestOutput], Frames]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is to be generated."""

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    cache_salt: str
    user: str = ""
    """Label of the client's user, with whom the others of its key share fairly."""
    reader: Callable[[], MessageReader] | None = None
    """Makes a reader for the text of each sequence: it has more than content. None: it is content."""
    count: Callable[[], CountsReasoning] | None = None
    """Makes what counts the reasoning of each sequence; None: there is none."""
    pooling: Pooling | None = None
    """A vector of each prompt is wanted instead of text."""
    beams: BeamTerms | None = None
    """Text is found by a beam search."""


@dataclasses.dataclass(slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def plain(self) -> JsonObject:
        """In OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class AnswerShape(Protocol):
    """How an endpoint words its answer."""

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The JSON of an answer that is not streamed. What is large in it is laid out when it is written."""

    def frames(self, prompt_index: int, output: RequestOutput) -> Frames:
        """Events for new output, possibly none."""

    def closing(self, usage: JsonObject) -> Frames:
        """The last events of a stream that came to its end."""


async def answer(state: ServerState, exchange: Exchange, job: Job, shape: AnswerShape, *, streams: bool) -> None:
    """Run `job` and answer, in events if it `streams`. Raises what submission or the engine raises, and ClientGone when
    the client left."""
    exchange.tenant.enter()
    if exchange.is_background and state.limits.has_priorities:
        job = dataclasses.replace(job, priority=BACKGROUND_PRIORITY)
    writer = EventStreamWriter(exchange, state.answers) if streams else None
    exchange_task = ExchangeTask(exchange, state.config, writer)
    if writer is not None:
        await state.run_exchange(exchange_task, _stream(state, exchange, job, shape, writer))
    else:
        data = await state.run_exchange(exchange_task, _whole(state, exchange, job, shape))
        if data is not None:
            await exchange.respond(200, data)


async def _whole(state: ServerState, exchange: Exchange, job: Job, shape: AnswerShape) -> bytes | None:
    """A small answer; a large one is written as it is laid out, and None comes back."""
    async with Generation(state, exchange, job) as generation:
        outputs = await generation.collect()
    value = shape.whole(outputs, generation.usage.plain())
    if sum(map(_n_cells, outputs)) <= SMALL_CELLS:
        return encoded(value)
    await state.answers.respond_json(exchange, value)
    return None


def _n_cells(output: RequestOutput) -> int:
    """About how much there is to lay out."""
    n_cells = len(output.pooled or ()) + (0 if output.prompt_logprobs is None else output.prompt_logprobs.n_cells)
    for part in output.outputs:
        n_cells += CHOICE_CELLS + len(part.token_ids) + (0 if part.logprobs is None else part.logprobs.n_cells)
    return n_cells


async def _stream(
    state: ServerState, exchange: Exchange, job: Job, shape: AnswerShape, writer: EventStreamWriter
) -> None:
    async with Generation(state, exchange, job) as generation:
        await generation.deliver(writer, shape.frames)
    await writer.finish(shape.closing(generation.usage.plain()))


class Generation:
    """The open streams of one request. Use as `async with`: leaving it cancels what still runs."""

    def __init__(self, state: ServerState, exchange: Exchange, job: Job) -> None:
        self._llm = state.llm
        self._metrics = state.metrics
        self._tenant, self._adapter = exchange.tenant, exchange.adapter
        self._is_strict = exchange.ignored.is_strict
        self._max_len = state.limits.max_len
        self._recorder = state.recorder
        self._trace = None if state.traces is None else RequestTrace(state.traces, exchange)
        self._began_s = time.monotonic()
        self._n_complete = 0
        config = state.config
        self._terms = Terms(self._tenant.name, job.user, config.max_queue_seconds, config.request_timeout)
        self.job = job
        self.usage = Usage()
        self._streams: list[RequestStream] = []

    async def __aenter__(self) -> Generation:
        """Submit every prompt; on any refusal the earlier ones are cancelled."""
        job = self.job
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._close)
            checked = await self._llm.check(job.params)
            turn_s = time.monotonic()
            for index, prompt in enumerate(job.prompts):
                if time.monotonic() - turn_s > TURN_S:
                    await asyncio.sleep(0)  # a thousand prompts are submitted in turns with other work
                    turn_s = time.monotonic()
                stream = await self._llm.submit(
                    prompt,
                    self._params(prompt),
                    request_id=f"{job.request_id}-{index}",
                    priority=job.priority,
                    cache_salt=self._tenant.salted(job.cache_salt),
                    terms=self._terms,
                    adapter=self._adapter,
                    pooling=job.pooling,
                    beams=job.beams,
                    checked=checked,
                )
                self._streams.append(stream)
                self.usage.prompt_tokens += len(prompt)
            undo.pop_all()
        return self

    async def __aexit__(self, _kind: object, error: object, _place: object) -> None:
        await self._close()
        if self._trace is not None:
            counts = (self.usage.prompt_tokens, self.usage.completion_tokens, self.usage.cached_tokens)
            self._trace.end(self.job.params, counts, error)
        if self._recorder.is_on:
            job, n_output = self.job, self.usage.completion_tokens
            seconds, is_complete = time.monotonic() - self._began_s, self._n_complete == len(job.prompts)
            self._recorder.note(job.prompts, job.params, n_output, seconds, is_complete=is_complete)

    def _params(self, prompt: list[int]) -> SamplingParams:
        """Of one prompt: `max_tokens` is lowered to the room that it leaves, if there is some (`fit_output`)."""
        params, room = self.job.params, self._max_len - len(prompt)
        if self._is_strict or params.max_tokens is None or not max(1, params.min_tokens) <= room < params.max_tokens:
            return params
        return msgspec.structs.replace(params, max_tokens=room)

    async def collect(self) -> list[RequestOutput]:
        """The final output of each prompt, in order."""
        if len(self._streams) == 1:
            return [await self._last(self._streams[0])]
        async with _FirstError(), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._last(stream)) for stream in self._streams]
        return [task.result() for task in tasks]

    async def deliver(self, writer: EventStreamWriter, frames: FrameSource) -> None:
        """Write the frames of all outputs as they come."""
        if len(self._streams) == 1:
            await self._pump(0, self._streams[0], writer, frames)
            return
        async with _FirstError(), asyncio.TaskGroup() as group:
            for index, stream in enumerate(self._streams):
                group.create_task(self._pump(index, stream, writer, frames))

    async def _last(self, stream: RequestStream) -> RequestOutput:
        last = None
        async for output in stream:
            last = output
        if last is None:
            raise internal_error()
        n_tokens = sum(len(part.token_ids) for part in last.outputs)
        self._check(last)
        self._account(last, n_tokens)
        self._count_reasoning({}, last)
        return last

    async def _pump(self, index: int, stream: RequestStream, writer: EventStreamWriter, frames: FrameSource) -> None:
        now_s = asyncio.get_running_loop().time
        last_s, n_tokens = 0.0, 0
        counts: dict[int, CountsReasoning] = {}
        async for output in stream:
            self._check(output)
            self._count_reasoning(counts, output)
            n_new = sum(len(part.token_ids) for part in output.outputs)
            if n_new:
                time_s = now_s()
                if last_s:
                    self._metrics.itl.observe((time_s - last_s) * len(output.outputs) / n_new, n_new)
                last_s = time_s
                n_tokens += n_new
            if output.finished:
                self._account(output, n_tokens)
            made = frames(index, output)
            if isinstance(made, bytes):
                if made:
                    await writer.put(made)
            else:
                await writer.put_pieces(made)

    def _check(self, output: RequestOutput) -> None:
        for part in output.outputs:
            if part.finish_reason == "error":
                raise _raised(part.failure, self.job.request_id, self._adapter)
            if part.finish_reason == "abort":
                raise unavailable("aborted", "The request was ended by the server.")

    def _count_reasoning(self, counts: dict[int, CountsReasoning], output: RequestOutput) -> None:
        """counts: of each choice of this prompt, as far as it has come."""
        if self.job.count is None:
            return
        for part in output.outputs:
            if part.index not in counts:
                counts[part.index] = self.job.count()
            counts[part.index].feed(part.token_ids)
        if output.finished:
            self.usage.reasoning_tokens += sum(count.n_tokens for count in counts.values())

    def _account(self, output: RequestOutput, n_tokens: int) -> None:
        self.usage.completion_tokens += n_tokens
        self.usage.cached_tokens += output.num_cached_tokens
        self._n_complete += 1
        self._metrics.observe_params(self.job.params.n, self.job.params.max_tokens)
        self._tenant.charge(len(output.prompt_token_ids) + n_tokens)
        self._metrics.observe_request(output.metrics, len(output.prompt_token_ids), n_tokens)
        if self._trace is not None:
            self._trace.add(output)

    async def _close(self) -> None:
        # A dead engine cannot be told to cancel; the error that matters is already on its way.
        with contextlib.suppress(QuireError):
            await self._llm.abort_streams(self._streams)


def _raised(failure: Failure | None, request_id: str, adapter: str) -> Exception:
    """What the failure of a sequence means for its request. Why the engine failed, the log alone says."""
    error = None if failure is None else error_of(failure)
    if isinstance(error, RequestError):
        return error
    whose = f" for adapter {shown(adapter)}" if adapter else ""
    why = "no reason was given" if failure is None else f"{failure.message} ({failure.code.value})"
    logger.error("request %s%s failed in the engine: %s", request_id, whose, why)
    return Refusal(500, "The engine failed while it computed this sequence.", code="sequence_fault")


class _FirstError:
    """Turns a TaskGroup's ExceptionGroup into its first exception."""

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
