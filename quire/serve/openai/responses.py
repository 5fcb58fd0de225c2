"""POST /v1/responses, without memory: every request brings its whole conversation, and nothing is kept.

A request is turned into chat's words (`responses_input.py`), so that one set of checks holds for both.
"""

from __future__ import annotations

from quire.core.errors import RequestError
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import Refusal, refusal_of
from quire.serve.openai.chat import chat_job
from quire.serve.openai.generation import answer
from quire.serve.openai.naming import renamed
from quire.serve.openai.refused_fields import GENERATING
from quire.serve.openai.responses_events import ResponseAnswer
from quire.serve.openai.responses_input import translate
from quire.serve.openai.responses_schema import ResponsesRequest
from quire.serve.state import ServerState

_DECODER: BodyDecoder[ResponsesRequest] = BodyDecoder(ResponsesRequest, refused=GENERATING)


async def serve_responses(state: ServerState, exchange: Exchange) -> None:
    """Answer one request for a response."""
    state.check_open()
    body = await state.read(exchange, _DECODER)
    state.choose_model(exchange, body.model)
    translated = await state.parse(lambda: translate(body, exchange.ignored), exchange.body_bytes)
    chat, names = translated.chat, translated.names
    try:
        job = await chat_job(state, exchange, chat, names)
        tokens = state.token_names(as_ids=False)
        shows = bool(chat.logprobs)
        shape = ResponseAnswer(body, job.params, exchange.request_id, tokens, job.reader, shows_logprobs=shows)
        exchange.error_event = shape.failure
        await answer(state, exchange, job, shape, streams=bool(body.stream))
    except RequestError as error:
        raise refusal_of(error, names) from None
    except Refusal as refusal:
        raise renamed(refusal, names) from None
