"""POST /v1/embeddings: one vector a prompt, made of the decoder's final states. Owns the shape of the answer.

Does not own pooling (`core/request.py`, `compute/runner`) nor running (`generation.py`).
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable

import msgspec
import numpy as np

from quire.core.errors import InvalidParameter, RequestError, shown
from quire.core.outputs import RequestOutput
from quire.core.request import Pooling, pooling_params
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.json_pieces import Items
from quire.serve.http.refusal import bad_request, internal_error, refusal_of
from quire.serve.openai.generation import Job, answer
from quire.serve.openai.prompts import prompts_of
from quire.serve.openai.refused_fields import EMBEDDING
from quire.serve.openai.schema import EmbeddingRequest, JsonObject
from quire.serve.openai.validation import (
    MAX_LABEL_CHARS,
    check_priority,
    check_sequences,
    check_text,
    user_label,
)
from quire.serve.state import ServerState

_DECODER: BodyDecoder[EmbeddingRequest] = BodyDecoder(EmbeddingRequest, ids_field="input", refused=EMBEDDING)
_POOLINGS = {pooling.value: pooling for pooling in Pooling}
FORMATS = ("float", "base64")


async def serve_embeddings(state: ServerState, exchange: Exchange) -> None:
    """Answer one request for vectors."""
    state.check_open()
    body = await state.read(exchange, _DECODER)
    state.choose_model(exchange, body.model)
    await answer_with_vectors(state, exchange, body, EmbeddingAnswer)


async def answer_with_vectors(
    state: ServerState, exchange: Exchange, body: EmbeddingRequest, make: Callable[..., EmbeddingAnswer]
) -> None:
    """Check the fields, make the vectors, and answer in the shape that `make` gives: arguments of `EmbeddingAnswer`."""
    priority = check_priority(body.priority, state.limits)
    check_text("user", body.user, MAX_LABEL_CHARS)
    form, pooling = body.encoding_format or FORMATS[0], body.pooling or Pooling.LAST.value
    if form not in FORMATS:
        raise bad_request(f"encoding_format = {shown(form)} is not allowed: float or base64.", "encoding_format")
    if pooling not in _POOLINGS:
        raise bad_request(f"pooling = {shown(pooling)} is not allowed: {' or '.join(_POOLINGS)}.", "pooling")
    try:
        texts = await state.parse(
            lambda: prompts_of(body.input, "input", state.config.max_prompts, state.llm.max_model_len),
            exchange.body_bytes,
        )
        check_sequences(len(texts), 1, state.limits)
        if body.dimensions is not None and body.dimensions < 1:
            raise InvalidParameter("dimensions", body.dimensions, "1 or more")
        prompts = await state.prompts.encode_all(texts, add_special_tokens=body.add_special_tokens, param="input")
        user, salt = user_label(body.user), body.cache_salt or ""
        job = Job(exchange.request_id, prompts, pooling_params(), priority, salt, user, pooling=_POOLINGS[pooling])
        shape = make(body.model, form, body.dimensions, normalize=body.normalize is not False)
        await answer(state, exchange, job, shape, streams=False)
    except RequestError as error:
        raise refusal_of(error, {"prompt": "input"}) from None


class EmbeddingAnswer:
    """The vectors of one request. n_kept: of their first dimensions, None for all. normalize: to length 1."""

    def __init__(self, model: str, form: str, n_kept: int | None = None, *, normalize: bool) -> None:
        self._model = model
        self._form = form
        self._n_kept = n_kept
        self._normalize = normalize

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The answer, with its numbers as JSON text already: they are most of the work. Raises InvalidParameter if the
        vectors are shorter than what was asked for."""
        width = min((len(output.pooled or ()) for output in outputs), default=0)
        if self._n_kept is not None and self._n_kept > width:
            raise InvalidParameter("dimensions", self._n_kept, f"at most {width}, what this model's vectors have")
        return {
            "object": "list",
            "model": self._model,
            "data": Items(lambda: map(self._entry, itertools.count(), outputs)),
            "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]},
        }

    def frames(self, _prompt_index: int, _output: RequestOutput) -> bytes:
        """Vectors are not streamed."""
        raise internal_error()

    def closing(self, _usage: JsonObject) -> bytes:
        """Vectors are not streamed."""
        raise internal_error()

    def _entry(self, index: int, output: RequestOutput) -> JsonObject:
        return {"object": "embedding", "index": index, "embedding": self._vector(output)}

    def _vector(self, output: RequestOutput) -> msgspec.Raw:
        if output.pooled is None:
            raise internal_error()
        vector = np.asarray(output.pooled, np.float64)[: self._n_kept]
        length = float(np.linalg.norm(vector))
        if self._normalize and length > 0:
            vector /= length
        single = vector.astype("<f4")
        if self._form == "base64":
            return msgspec.Raw(b'"' + base64.b64encode(single.tobytes()) + b'"')
        return msgspec.Raw(msgspec.json.encode(single.tolist()))
