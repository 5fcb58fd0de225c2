"""POST /pooling: vectors of prompts in vLLM's shape. Does not own pooling nor running; see `embeddings.py`."""

from __future__ import annotations

import functools
import time

from quire.core.errors import shown
from quire.core.outputs import RequestOutput
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import bad_request, unsupported
from quire.serve.openai.embeddings import EmbeddingAnswer, answer_with_vectors
from quire.serve.openai.schema import EmbeddingRequest, JsonObject
from quire.serve.openai.scoring_schema import PoolingRequest
from quire.serve.state import ServerState

_DECODER: BodyDecoder[PoolingRequest] = BodyDecoder(PoolingRequest, ids_field="input")
NOT_TASKS = ("token_embed", "token_classify", "classify", "score", "plugin")
"""vLLM's other tasks."""


async def serve_pooling(state: ServerState, exchange: Exchange) -> None:
    """Answer one request for vectors, in vLLM's shape."""
    state.check_open()
    body = await state.read(exchange, _DECODER)
    state.choose_model(exchange, body.model)
    if body.task in NOT_TASKS:
        raise unsupported("task", f"only embed is, not {body.task}: classes and vectors of tokens are not made here.")
    if body.task not in (None, "embed"):
        raise bad_request(f"task = {shown(body.task)} is not allowed: it must be embed.", "task")
    if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
        raise bad_request("normalize and use_activation are two names of one thing and disagree.", "use_activation")
    normalize = body.use_activation if body.normalize is None else body.normalize
    same = EmbeddingRequest(
        model=body.model,
        input=body.input,
        encoding_format=body.encoding_format,
        dimensions=body.dimensions,
        pooling=body.pooling,
        normalize=normalize,
        add_special_tokens=body.add_special_tokens,
        priority=body.priority,
        cache_salt=body.cache_salt,
        user=body.user,
    )
    await answer_with_vectors(state, exchange, same, functools.partial(PoolingAnswer, exchange.request_id))


class PoolingAnswer(EmbeddingAnswer):
    """The vectors of one request, as `data` of each entry."""

    def __init__(self, request_id: str, model: str, form: str, n_kept: int | None, *, normalize: bool) -> None:
        super().__init__(model, form, n_kept, normalize=normalize)
        self._head: JsonObject = {"id": f"pool-{request_id}", "created": int(time.time())}

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The answer."""
        return {**self._head, **super().whole(outputs, usage)}

    def _entry(self, index: int, output: RequestOutput) -> JsonObject:
        return {"object": "pooling", "index": index, "data": self._vector(output)}
