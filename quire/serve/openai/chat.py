"""POST /v1/chat/completions. Owns the shape of chat answers and the fields that only chat has.

Does not own shared checks (`validation.py`), conversations (`conversation.py`) or running (`generation.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping

from quire.core.errors import InvalidParameter, RequestError, shown
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.json_pieces import Items, LaidOut
from quire.serve.http.refusal import bad_request, refusal_of, unsupported
from quire.serve.openai.beams import beam_names, beam_terms
from quire.serve.openai.constraints import constraint_names, structured_outputs
from quire.serve.openai.conversation import (
    Conversation,
    add_defaults,
    check_tool_choice,
    conversation_of,
    kept_choice,
)
from quire.serve.openai.frames import ChatFrames
from quire.serve.openai.generation import Job, answer
from quire.serve.openai.logprobs import TokenNames, chat_logprobs, chat_pieces, prompt_pieces
from quire.serve.openai.refused_fields import GENERATING
from quire.serve.openai.schema import ChatRequest, JsonObject
from quire.serve.openai.tooling import EFFORT, Reading, reading_of, reasoning_kwargs, thinking_budget
from quire.serve.openai.validation import (
    bound_output,
    check_cells,
    check_labels,
    check_priority,
    check_sequences,
    fit_output,
    note_stream_options,
    sampling_params,
    stream_choice,
    user_label,
)
from quire.serve.state import ServerState
from quire.text.message import Call, MessageReader, Piece, PieceKind

_DECODER: BodyDecoder[ChatRequest] = BodyDecoder(ChatRequest, refused=GENERATING)


async def serve_chat(state: ServerState, exchange: Exchange) -> None:
    """Answer one chat completion request."""
    state.check_open()
    body = await state.read(exchange, _DECODER)
    state.choose_model(exchange, body.model)
    renamed = {"prompt": "messages", "logprobs": "top_logprobs", **constraint_names(body), **beam_names(body)}
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    try:
        job = await chat_job(state, exchange, body)
        names = state.token_names(body.return_tokens_as_token_ids)
        shape = ChatAnswer(body, exchange.request_id, names, job.reader)
        await answer(state, exchange, job, shape, streams=stream_choice(body).on)
    except RequestError as error:
        raise refusal_of(error, renamed) from None


async def chat_job(
    state: ServerState, exchange: Exchange, body: ChatRequest, names: Mapping[str, str] | None = None
) -> Job:
    """Every check of a conversation, then its prompt. The other endpoints that hold conversations bring theirs here.
    names: chat's field → the client's."""
    priority = check_priority(body.priority, state.limits)
    check_labels(body)
    note_stream_options(body, exchange.ignored)
    body.tool_choice = kept_choice(body.tool_choice, body.tools, exchange.ignored)
    check_tool_choice(body.tool_choice, body.tools)
    _check_chat_fields(body)
    thinking_budget(body)
    beams, limits = beam_terms(body, exchange.ignored, state.limits)
    params = await state.parse(
        lambda: sampling_params(
            body,
            limits,
            max_tokens=_max_tokens(body),
            logprobs=_n_logprobs(body),
            prompt_logprobs=body.prompt_logprobs,
            structured=structured_outputs(body),
        ),
        exchange.body_bytes,
    )
    check_sequences(1, params.n, state.limits)
    conversation, prompt = await chat_prompt(state, exchange, body, names)
    check_cells(len(prompt), params.prompt_logprobs, "prompt_logprobs")
    exchange.more_headers += fit_output(params, [len(prompt)], state.limits, is_strict=exchange.ignored.is_strict)
    bound_output(params, [len(prompt)], state.limits)

    def read() -> Reading:
        style, tokenizer = state.style, state.llm.tokenizer
        reading = reading_of(body, style, tokenizer, conversation, prompt, params.structured_outputs)
        params.structured_outputs = reading.structured
        params.skip_special_tokens &= not reading.shows_special
        if not params.ignore_eos:
            params.stop_token_ids = [*params.stop_token_ids, *reading.stop_ids]
        return reading

    reading = await state.parse(read, exchange.body_bytes)
    user = user_label(body.user, body.safety_identifier)
    salt = body.cache_salt or ""
    return Job(exchange.request_id, [prompt], params, priority, salt, user, reading.reader, reading.count, beams=beams)


async def chat_prompt(
    state: ServerState, exchange: Exchange, body: ChatRequest, names: Mapping[str, str] | None = None
) -> tuple[Conversation, list[int]]:
    """The conversation and its token ids, once its own checks have passed. names: as for `chat_job`."""
    conversation = await state.parse(
        lambda: conversation_of(
            body,
            exchange.ignored,
            variables=state.template_variables,
            with_tools=body.tool_choice != "none",
        ),
        exchange.body_bytes,
    )
    called = (names or {}).get(EFFORT, EFFORT)
    asked = reasoning_kwargs(body.reasoning_effort, body.thinking, state.style, exchange.ignored, called)
    for name, value in asked.items():
        if conversation.kwargs.get(name, value) != value:
            raise bad_request(f"{called} and chat_template_kwargs.{name} disagree.", "chat_template_kwargs")
        conversation.kwargs[name] = value
    add_defaults(conversation, state.config.default_chat_template_kwargs)
    special = bool(body.add_special_tokens)
    return conversation, await state.prompts.encode_conversation(conversation, add_special_tokens=special)


class ChatAnswer:
    """The shape of one chat answer, whole or in chunks."""

    def __init__(
        self, body: ChatRequest, request_id: str, names: TokenNames, reader: Callable[[], MessageReader] | None = None
    ) -> None:
        self._body = body
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._n_top = body.top_logprobs or 0
        self._names = names
        self._frames = ChatFrames(self._id, self._created, body.model, stream_choice(body))
        self._begun: set[int] = set()
        self._reader = reader
        self._readers: dict[int, MessageReader] = {}

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The answer of a request that is not streamed."""
        body, output = self._body, outputs[0]
        found: JsonObject = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": body.model,
            "choices": Items(lambda: (self._choice(part) for part in output.outputs)),
            "usage": usage,
        }
        if body.prompt_logprobs is not None:
            found["prompt_logprobs"] = LaidOut(lambda: prompt_pieces(output.prompt_logprobs, self._names))
        return found

    def frames(self, _prompt_index: int, output: RequestOutput) -> bytes:
        """Chunks for what is new."""
        n_prompt = len(output.prompt_token_ids)
        return b"".join([self._part(part, n_prompt) for part in output.outputs])

    def closing(self, usage: JsonObject) -> bytes:
        """The counts, if asked for, and the end."""
        return self._frames.closing(usage)

    def _choice(self, part: CompletionOutput) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": part.text, "refusal": None}
        reason = part.finish_reason
        if self._reader is not None:
            whole = self._reader().whole(part.text)
            message["content"] = whole.content if whole.calls else whole.content or ""
            if whole.reasoning is not None:
                message["reasoning_content"] = message["reasoning"] = whole.reasoning
            if whole.calls:
                message["tool_calls"] = [_call(one) for one in whole.calls]
                reason = called(reason)
        rows = LaidOut(lambda: chat_pieces(part.logprobs, self._n_top, self._names)) if self._body.logprobs else None
        return {
            "index": part.index,
            "message": message,
            "logprobs": rows,
            "finish_reason": reason,
            "stop_reason": part.stop_reason,
        }

    def _part(self, part: CompletionOutput, n_prompt: int) -> bytes:
        index, frames = part.index, b""
        if index not in self._begun:
            self._begun.add(index)
            self._frames.count(index, n_prompt, 0)
            frames = self._frames.role(index)
        self._frames.count(index, n_prompt, len(part.token_ids))
        if self._reader is not None:
            return frames + self._read_part(self._reader, part)
        if self._body.logprobs and part.logprobs:
            frames += self._frames.text(index, part.text, chat_logprobs(part.logprobs, self._n_top, self._names))
        elif part.text:
            frames += self._frames.text(index, part.text)
        if part.finish_reason is not None:
            frames += self._frames.finish(index, part.finish_reason, part.stop_reason)
        return frames

    def _read_part(self, make: Callable[[], MessageReader], part: CompletionOutput) -> bytes:
        """The same where the text has more than content. Logprobs of all its tokens come with content, maybe empty."""
        index, frames = part.index, []
        if index not in self._readers:
            self._readers[index] = make()
        reader = self._readers[index]
        pieces = reader.feed(part.text)
        if part.finish_reason is not None:
            pieces += reader.finish()
        if self._body.logprobs and part.logprobs:
            rows = chat_logprobs(part.logprobs, self._n_top, self._names)
            frames.append(self._frames.text(index, "", rows))
        frames += [self._piece(index, piece) for piece in pieces]
        if part.finish_reason is not None:
            reason = (called(part.finish_reason) if reader.n_calls else None) or part.finish_reason
            frames.append(self._frames.finish(index, reason, part.stop_reason))
        return b"".join(frames)

    def _piece(self, index: int, piece: Piece) -> bytes:
        match piece.kind:
            case PieceKind.CONTENT:
                return self._frames.text(index, piece.text)
            case PieceKind.REASONING:
                return self._frames.reasoning(index, piece.text)
            case PieceKind.CALL:
                return self._frames.call(index, piece.call, call_id(), piece.text)
            case PieceKind.ARGUMENTS:
                return self._frames.arguments(index, piece.call, piece.text)


def call_id() -> str:
    """A fresh id of a tool call. Its last nine characters are letters and digits, as Mistral's templates want them."""
    return f"call_{secrets.token_hex(12)}"


def called(reason: str | None) -> str | None:
    """The finish reason of a message with calls."""
    return "tool_calls" if reason == "stop" else reason


def _call(call: Call) -> JsonObject:
    return {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _max_tokens(body: ChatRequest) -> int | None:
    """OpenAI's newer name and the older one may both be given if they agree."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(
            f"max_tokens = {shown(old)} and max_completion_tokens = {shown(new)} disagree: send one of them.",
            "max_completion_tokens",
        )
    return old if new is None else new


def _n_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        if top != 0:
            raise bad_request("top_logprobs is only allowed when logprobs is true.", "top_logprobs")
        return None
    if top is not None and top < 0:
        raise InvalidParameter("top_logprobs", top, "0 or more")
    return (top or 0) if body.logprobs else None


def _check_chat_fields(body: ChatRequest) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "not together with stream.")
