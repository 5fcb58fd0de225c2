"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API for conversations.

A request is turned into chat's words (`input.py`), so that one set of checks holds for both. Errors on these
paths have Anthropic's shape (`http/dialect.py`).
"""

from __future__ import annotations

from quire.core.errors import RequestError
from quire.serve.anthropic.context_edits import check_edits
from quire.serve.anthropic.events import MessageAnswer
from quire.serve.anthropic.input import translate
from quire.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import Refusal, refusal_of
from quire.serve.openai.chat import chat_job, chat_prompt
from quire.serve.openai.generation import answer
from quire.serve.openai.naming import renamed
from quire.serve.openai.refused_fields import GENERATING, PROMPTING
from quire.serve.state import ServerState

_MESSAGES: BodyDecoder[MessagesRequest] = BodyDecoder(MessagesRequest, refused=GENERATING)
_COUNT: BodyDecoder[CountTokensRequest] = BodyDecoder(CountTokensRequest, refused=PROMPTING)


async def serve_messages(state: ServerState, exchange: Exchange) -> None:
    """Answer one request for a message."""
    state.check_open()
    body = await state.read(exchange, _MESSAGES)
    state.choose_model(exchange, body.model)
    translated = await state.parse(lambda: translate(body, exchange.ignored), exchange.body_bytes)
    try:
        job = await chat_job(state, exchange, translated.chat, translated.names)
        check_edits(body, len(job.prompts[0]), exchange.ignored)
        shape = MessageAnswer(body.model, exchange.request_id, job.reader)
        await answer(state, exchange, job, shape, streams=bool(body.stream))
    except RequestError as error:
        raise refusal_of(error, translated.names) from None
    except Refusal as refusal:
        raise renamed(refusal, translated.names) from None


async def serve_count_tokens(state: ServerState, exchange: Exchange) -> None:
    """Length of a conversation in tokens, after the chat template."""
    state.check_open()
    body = await state.read(exchange, _COUNT)
    state.choose_model(exchange, body.model)
    translated = await state.parse(lambda: translate(body, exchange.ignored), exchange.body_bytes)
    try:
        _, prompt = await chat_prompt(state, exchange, translated.chat, translated.names)
        check_edits(body, len(prompt), exchange.ignored)
    except RequestError as error:
        raise refusal_of(error, translated.names) from None
    except Refusal as refusal:
        raise renamed(refusal, translated.names) from None
    await exchange.respond_json({"input_tokens": len(prompt)})
