"""POST /v1/completions. Owns the shape of text completions, `echo`, and several prompts in one request.

Does not own shared checks (`validation.py`) or running (`generation.py`).
Invariant: choice `index` is prompt index times n plus the completion's own index.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import msgspec

from quire.core.errors import InvalidParameter, RequestError
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling import MAX_N
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.json_pieces import Items, LaidOut
from quire.serve.http.refusal import refusal_of, unsupported
from quire.serve.openai.beams import beam_names, beam_terms
from quire.serve.openai.constraints import constraint_names, structured_outputs
from quire.serve.openai.frames import TextFrames
from quire.serve.openai.generation import Job, answer
from quire.serve.openai.logprobs import TextLogprobs, TextPart, TokenNames, prompt_pieces
from quire.serve.openai.prompts import prompts_of
from quire.serve.openai.refused_fields import GENERATING
from quire.serve.openai.schema import CompletionRequest, JsonObject
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

DEFAULT_MAX_TOKENS = 16

_DECODER: BodyDecoder[CompletionRequest] = BodyDecoder(CompletionRequest, ids_field="prompt", refused=GENERATING)


async def serve_completion(state: ServerState, exchange: Exchange) -> None:
    """Answer one text completion request."""
    state.check_open()
    body = await state.read(exchange, _DECODER)
    state.choose_model(exchange, body.model)
    try:
        job = await _job(state, exchange, body)
        names = state.token_names(body.return_tokens_as_token_ids)
        shows_ids = state.llm.tokenizer is None if body.return_token_ids is None else body.return_token_ids
        echoed = await _echoed(state, body, job)
        shape = TextAnswer(body, exchange.request_id, _or_one(body.n), echoed, names, shows_ids=shows_ids)
        await answer(state, exchange, job, shape, streams=stream_choice(body).on)
    except RequestError as error:
        raise refusal_of(error, {**constraint_names(body), **beam_names(body, body.best_of)}) from None


async def _job(state: ServerState, exchange: Exchange, body: CompletionRequest) -> Job:
    """Every check of the request, then its prompts as token ids."""
    priority = check_priority(body.priority, state.limits)
    check_labels(body)
    note_stream_options(body, exchange.ignored)
    _check_text_fields(body)
    beams, limits = beam_terms(body, exchange.ignored, state.limits, body.best_of)
    rows = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
    params = await state.parse(
        lambda: sampling_params(
            body,
            limits,
            max_tokens=_max_tokens(body),
            logprobs=body.logprobs,
            prompt_logprobs=rows,
            structured=structured_outputs(body),
        ),
        exchange.body_bytes,
    )
    if beams is None and body.best_of is not None and body.best_of > params.n:
        # The sums of logprobs by which completions are compared come with the logprobs.
        params = msgspec.structs.replace(params, n=body.best_of, logprobs=params.logprobs or 0)
    texts = await state.parse(
        lambda: prompts_of(body.prompt, "prompt", state.config.max_prompts, state.llm.max_model_len),
        exchange.body_bytes,
    )
    check_sequences(len(texts), params.n if beams is None else beams.width, state.limits)
    prompts = await state.prompts.encode_all(texts, add_special_tokens=body.add_special_tokens, param="prompt")
    check_cells(sum(map(len, prompts)), params.prompt_logprobs, "echo" if body.echo else "prompt_logprobs")
    lens = list(map(len, prompts))
    exchange.more_headers += fit_output(params, lens, state.limits, is_strict=exchange.ignored.is_strict)
    bound_output(params, lens, state.limits, "best_of" if body.logprobs is None else "logprobs")
    user = user_label(body.user, body.safety_identifier)
    return Job(exchange.request_id, prompts, params, priority, body.cache_salt or "", user, beams=beams)


def _max_tokens(body: CompletionRequest) -> int:
    """`max_tokens`, where 0 is allowed with `echo`: one token is computed and not shown."""
    if body.max_tokens == 0 and body.echo:
        return 1
    return DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens


def _check_text_fields(body: CompletionRequest) -> None:
    n, best_of = _or_one(body.n), body.best_of
    if best_of is not None and not n <= best_of <= MAX_N:
        raise InvalidParameter("best_of", best_of, f"an integer from n = {n} to {MAX_N}")
    if best_of is not None and best_of > n and body.stream and not body.use_beam_search:
        raise unsupported("best_of", f"not above n = {n} together with stream: the best is known at the end only.")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "not together with stream; echo with logprobs is.")
    if (
        body.echo
        and body.prompt_logprobs is not None
        and body.logprobs is not None
        and body.prompt_logprobs != body.logprobs
    ):
        raise InvalidParameter(
            "prompt_logprobs", body.prompt_logprobs, f"equal to logprobs = {body.logprobs} when echo is true"
        )


def _or_one(n: int | None) -> int:
    return 1 if n is None else n


async def _echoed(state: ServerState, body: CompletionRequest, job: Job) -> list[str]:
    """The prompts as text, when `echo` asks for them."""
    prompt = body.prompt
    if not body.echo:
        return []
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(text, str) for text in prompt):
        return [text for text in prompt if isinstance(text, str)]
    return await state.prompts.decode(job.prompts, "prompt")


def best(parts: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The n completions with the largest mean logprob a token, best first and numbered anew; all, if there are n."""
    if len(parts) <= n:
        return parts
    ranked = sorted(parts, key=lambda part: -(part.cumulative_logprob or 0.0) / max(len(part.token_ids), 1))
    return [dataclasses.replace(part, index=index) for index, part in enumerate(ranked[:n])]


class TextAnswer:
    """The shape of one text completion, whole or in chunks. shows_ids: with the ids of its tokens."""

    def __init__(
        self,
        body: CompletionRequest,
        request_id: str,
        n: int,
        echoed: list[str],
        names: TokenNames,
        *,
        shows_ids: bool = False,
    ) -> None:
        self._body = body
        self._n = n
        self._echoed = echoed
        self._names = names
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._shows_output = body.max_tokens != 0
        self._shows_ids = shows_ids and self._shows_output
        self._frames = TextFrames(self._id, self._created, body.model, stream_choice(body))
        self._columns: dict[int, TextLogprobs] = {}

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The answer of a request that is not streamed."""

        def choices() -> Iterator[JsonObject]:
            for at, output in enumerate(outputs):
                for part in best(output.outputs, self._n):
                    yield self._choice(at, output, part)

        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model,
            "choices": Items(choices),
            "usage": self._shown_usage(usage),
        }

    def frames(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Chunks for what is new; the first of a choice repeats the prompt when asked."""
        return b"".join([self._part(prompt_index, output, part) for part in output.outputs])

    def closing(self, usage: JsonObject) -> bytes:
        """The counts, if asked for, and the end."""
        return self._frames.closing(self._shown_usage(usage))

    def _choice(self, at: int, output: RequestOutput, part: CompletionOutput) -> JsonObject:
        text, columns, rows = self._content(at, output, part)
        choice: JsonObject = {
            "index": at * self._n + part.index,
            "text": text,
            "logprobs": LaidOut(lambda: columns.pieces(rows)) if rows else None,
            "finish_reason": self._reason(part),
            "stop_reason": part.stop_reason,
        }
        if self._shows_ids:
            choice["token_ids"] = part.token_ids
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = LaidOut(lambda: prompt_pieces(output.prompt_logprobs, self._names))
        return choice

    def _part(self, at: int, output: RequestOutput, part: CompletionOutput) -> bytes:
        index = at * self._n + part.index
        self._frames.count(index, len(output.prompt_token_ids), len(part.token_ids) if self._shows_output else 0)
        text, columns, rows = self._content(at, output, part)
        logprobs = columns.piece(rows) if rows else None
        token_ids = part.token_ids if self._shows_ids and part.token_ids else None
        frames = self._frames.text(index, text, logprobs, token_ids) if text or logprobs or token_ids else b""
        if part.finish_reason is not None:
            frames += self._frames.finish(index, self._reason(part) or "stop", part.stop_reason)
        return frames

    def _content(
        self, at: int, output: RequestOutput, part: CompletionOutput
    ) -> tuple[str, TextLogprobs, list[TextPart]]:
        """Text of a part, and the rows of its logprobs with what lays them out; the first part of a choice has the
        echoed prompt before it."""
        index = at * self._n + part.index
        is_first = index not in self._columns
        columns = self._columns.setdefault(index, TextLogprobs(self._names))
        text = part.text if self._shows_output else ""
        rows: list[TextPart] = []
        if is_first and self._echoed:
            text = self._echoed[at] + text
            if self._body.logprobs is not None:
                rows.append(output.prompt_token_ids if output.prompt_logprobs is None else output.prompt_logprobs)
        if self._shows_output and self._body.logprobs is not None and part.logprobs is not None:
            rows.append(part.logprobs)
        return text, columns, rows

    def _reason(self, part: CompletionOutput) -> str | None:
        return part.finish_reason if self._shows_output else "length"

    def _shown_usage(self, usage: JsonObject) -> JsonObject:
        if self._shows_output:
            return usage
        return {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
