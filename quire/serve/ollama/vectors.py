"""POST /api/embed and /api/embeddings: vectors of prompts in Ollama's shapes. Does not own pooling nor running."""

from __future__ import annotations

import msgspec
import numpy as np

from quire.core.errors import RequestError
from quire.core.outputs import RequestMetrics, RequestOutput
from quire.core.request import Pooling, pooling_params
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.json_pieces import Items
from quire.serve.http.refusal import bad_request, internal_error, refusal_of
from quire.serve.ollama.input import served_name
from quire.serve.ollama.replies import NS
from quire.serve.ollama.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from quire.serve.ollama.unused import note_unused
from quire.serve.openai.generation import Job, answer
from quire.serve.openai.prompts import prompts_of
from quire.serve.openai.schema import JsonObject
from quire.serve.openai.tokens import most_tokens
from quire.serve.openai.validation import check_sequences
from quire.serve.state import ServerState

_EMBED: BodyDecoder[OllamaEmbedRequest] = BodyDecoder(OllamaEmbedRequest)
_EMBEDDINGS: BodyDecoder[OllamaEmbeddingsRequest] = BodyDecoder(OllamaEmbeddingsRequest)


async def serve_ollama_embed(state: ServerState, exchange: Exchange) -> None:
    """One vector of length 1 a text, as Ollama's /api/embed."""
    state.check_open()
    body = await state.read(exchange, _EMBED)
    state.choose_model(exchange, served_name(body.model, state.limits.model_names))
    note_unused(body, exchange.ignored)
    check_dimensions(body.dimensions, state)
    if not body.input:
        await exchange.respond_json({"model": body.model, "embeddings": []})
        return
    shape = EmbedAnswer(body.model, body.dimensions)
    await _answer(state, exchange, body.input, "input", shape, cuts=body.truncate is not False)


async def serve_ollama_embeddings(state: ServerState, exchange: Exchange) -> None:
    """The vector of one text as it is, as Ollama's older /api/embeddings."""
    state.check_open()
    body = await state.read(exchange, _EMBEDDINGS)
    state.choose_model(exchange, served_name(body.model, state.limits.model_names))
    note_unused(body, exchange.ignored)
    if not body.prompt:
        await exchange.respond_json({"embedding": []})
        return
    await _answer(state, exchange, body.prompt, "prompt", EmbeddingsAnswer(body.model, None), cuts=True)


async def _answer(
    state: ServerState, exchange: Exchange, given: str | list[str], param: str, shape: EmbedAnswer, *, cuts: bool
) -> None:
    """cuts: a text that is too long for the context loses its end, as Ollama has it, where others would be refused."""
    prompts, llm = state.prompts, state.llm
    listed: list[str | int | list[int]] | str = given if isinstance(given, str) else [*given]
    try:
        found = await state.parse(
            lambda: prompts_of(listed, param, state.config.max_prompts, llm.max_model_len), exchange.body_bytes
        )
        check_sequences(len(found), 1, state.limits)
        texts = [text for text in found if isinstance(text, str)]
        most = most_tokens(state) if cuts else None
        token_ids = await prompts.encode(texts, add_special_tokens=True, param=param, most=most)
        if cuts:
            token_ids = [ids[: llm.max_model_len - 1] for ids in token_ids]
        job = Job(exchange.request_id, token_ids, pooling_params(), 0, "", pooling=Pooling.LAST)
        await answer(state, exchange, job, shape, streams=False)
    except RequestError as error:
        raise refusal_of(error, {"prompt": param}) from None


def check_dimensions(n: int | None, state: ServerState) -> None:
    """400 for more numbers than the model's vectors have, or none."""
    size = state.llm.ready.model.hidden_size
    if n is not None and not 1 <= n <= size:
        raise bad_request(f"dimensions = {n} must be 1 to {size}.", "dimensions")


class EmbedAnswer:
    """The vectors of one request. n_dimensions: keep so many of the first numbers; None keeps all."""

    def __init__(self, model: str, n_dimensions: int | None) -> None:
        self._model, self._n_dimensions = model, n_dimensions

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The answer."""
        return {
            "model": self._model,
            "embeddings": Items(lambda: map(self._vector, outputs)),
            "total_duration": max(map(_duration_ns, outputs)),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
        }

    def frames(self, _prompt_index: int, _output: RequestOutput) -> bytes:
        """Vectors are not streamed."""
        raise internal_error()

    def closing(self, _usage: JsonObject) -> bytes:
        """Vectors are not streamed."""
        raise internal_error()

    def _vector(self, output: RequestOutput) -> msgspec.Raw:
        vector = np.asarray(output.pooled, np.float64)[: self._n_dimensions]
        length = float(np.linalg.norm(vector))
        single = (vector / length if length else vector).astype("<f4")
        return msgspec.Raw(msgspec.json.encode(single.tolist()))


class EmbeddingsAnswer(EmbedAnswer):
    """One vector, as it is."""

    def whole(self, outputs: list[RequestOutput], _usage: JsonObject) -> JsonObject:
        """The answer."""
        return {"embedding": outputs[0].pooled}


def _duration_ns(output: RequestOutput) -> int:
    metrics: RequestMetrics = output.metrics
    return max(0, round(((metrics.finished_s or metrics.arrival_s) - metrics.arrival_s) * NS))
