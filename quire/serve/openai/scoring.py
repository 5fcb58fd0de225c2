"""POST /v1/score and /rerank: how alike texts are, as the cosine of their vectors. Owns the shapes of both answers.

A model that reads two texts together (a cross-encoder) is none that can be loaded. Does not own pooling nor running.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from quire.core.errors import RequestError
from quire.core.outputs import RequestOutput
from quire.core.request import Pooling, pooling_params
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.json_pieces import Items
from quire.serve.http.refusal import bad_request, internal_error, refusal_of, unsupported
from quire.serve.openai.generation import Job, answer
from quire.serve.openai.prompts import prompts_of
from quire.serve.openai.schema import JsonObject
from quire.serve.openai.scoring_schema import RerankDocument, RerankRequest, ScoreRequest, Texts
from quire.serve.openai.validation import (
    MAX_LABEL_CHARS,
    check_priority,
    check_sequences,
    check_text,
    user_label,
)
from quire.serve.state import ServerState

_SCORE: BodyDecoder[ScoreRequest] = BodyDecoder(ScoreRequest)
_RERANK: BodyDecoder[RerankRequest] = BodyDecoder(RerankRequest)
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names under which the two sets of texts may come."""

Shape = Callable[[list[float], JsonObject], JsonObject]
"""(scores, usage) → the answer."""


async def serve_score(state: ServerState, exchange: Exchange) -> None:
    """How alike texts are: one with each of several, or pair by pair."""
    state.check_open()
    body = await state.read(exchange, _SCORE)
    state.choose_model(exchange, body.model)
    names, firsts, seconds = _sides(body)
    if len(firsts) not in (1, len(seconds)):
        counts = f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}"
        raise bad_request(f"{counts}: give one text, or as many as {names[1]}.", names[0])
    head: JsonObject = {"id": f"score-{exchange.request_id}", "object": "list", "created": int(time.time())}

    def shape(scores: list[float], usage: JsonObject) -> JsonObject:
        data = Items(lambda: ({"index": at, "object": "score", "score": one} for at, one in enumerate(scores)))
        return {**head, "model": body.model, "data": data, "usage": usage}

    await _compare(state, exchange, body, firsts, seconds, names, shape)


async def serve_rerank(state: ServerState, exchange: Exchange) -> None:
    """Documents in the order of how alike they are to a query, as Jina and Cohere have it."""
    state.check_open()
    body = await state.read(exchange, _RERANK)
    state.choose_model(exchange, body.model)
    if body.top_n is not None and body.top_n < 0:
        raise bad_request(f"top_n = {body.top_n} must be at least 1, or 0 for all.", "top_n")
    texts = [one.text if isinstance(one, RerankDocument) else one for one in body.documents]

    def shape(scores: list[float], usage: JsonObject) -> JsonObject:
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n or None]

        def result(at: int) -> JsonObject:
            shown = {} if body.return_documents is False else {"document": {"text": texts[at]}}
            return {"index": at, **shown, "relevance_score": scores[at]}

        head = {"id": f"rerank-{exchange.request_id}", "model": body.model, "usage": usage}
        return {**head, "results": Items(lambda: map(result, order))}

    await _compare(state, exchange, body, [body.query], texts, ("query", "documents"), shape)


def _sides(body: ScoreRequest) -> tuple[tuple[str, str], list[str], list[str]]:
    """The pair of names that a request uses, and the texts under them."""
    given = [name for name in dict.fromkeys(itertools.chain(*PAIRS)) if getattr(body, name) is not None]
    pair = next((pair for pair in PAIRS if set(pair) == set(given)), None)
    if pair is None:
        allowed = ", or ".join(f"{one} and {other}" for one, other in PAIRS)
        raise bad_request(f"Give two sets of texts: {allowed}.", given[0] if given else "text_1")
    one, other = (_listed(getattr(body, name)) for name in pair)
    return pair, one, other


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


async def _compare(
    state: ServerState,
    exchange: Exchange,
    body: ScoreRequest | RerankRequest,
    firsts: list[str],
    seconds: list[str],
    names: tuple[str, str],
    shape: Shape,
) -> None:
    """Make the vector of each text once, and answer with their cosines in the form that `shape` gives."""
    priority = check_priority(body.priority, state.limits)
    check_text("user", body.user, MAX_LABEL_CHARS)
    if body.use_activation is False:
        raise unsupported("use_activation", "a cosine has nothing that could be left out.")
    check_sequences(len(firsts) + len(seconds), 1, state.limits)
    prompts: list[list[int]] = []
    try:
        for name, texts in zip(names, (firsts, seconds), strict=True):
            found = await state.parse(
                lambda texts=texts, name=name: prompts_of(  # type: ignore[misc]
                    [*texts], name, state.config.max_prompts, state.llm.max_model_len
                ),
                exchange.body_bytes,
            )
            prompts += await state.prompts.encode_all(found, add_special_tokens=None, param=name)
        user, salt = user_label(body.user), body.cache_salt or ""
        job = Job(exchange.request_id, prompts, pooling_params(), priority, salt, user, pooling=Pooling.LAST)
        await answer(state, exchange, job, Comparison(len(firsts), shape), streams=False)
    except RequestError as error:
        raise refusal_of(error, {"prompt": names[1]}) from None


class Comparison:
    """The answer of a request whose first `n_firsts` prompts are compared with the others."""

    def __init__(self, n_firsts: int, shape: Shape) -> None:
        self._n_firsts, self._shape = n_firsts, shape

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """Each of the others with the only first one, or with its own."""
        units = [_unit(output) for output in outputs]
        firsts, seconds = units[: self._n_firsts], units[self._n_firsts :]
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        scores = [min(1.0, max(-1.0, float(one @ other))) for one, other in zip(firsts, seconds, strict=True)]
        counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]}
        return self._shape(scores, counts)

    def frames(self, _prompt_index: int, _output: RequestOutput) -> bytes:
        """Scores are not streamed."""
        raise internal_error()

    def closing(self, _usage: JsonObject) -> bytes:
        """Scores are not streamed."""
        raise internal_error()


def _unit(output: RequestOutput) -> np.ndarray:
    """Its vector with length 1; zeros stay zeros."""
    vector = np.asarray(output.pooled, np.float64)
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector
