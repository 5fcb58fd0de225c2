"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from quire.core.errors import InvalidParameter, RequestError
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import bad_request, refusal_of
from quire.serve.openai.conversation import add_defaults, conversation_of
from quire.serve.openai.refused_fields import PROMPTING
from quire.serve.openai.schema import DetokenizeRequest, JsonObject, TokenizeRequest
from quire.serve.state import ServerState

MAX_TOKENS = 128 * 1024
SMALL_TOKENS = 4096
"""Answers of up to so many tokens or characters are written at once."""

_TOKENIZE: BodyDecoder[TokenizeRequest] = BodyDecoder(TokenizeRequest, refused=PROMPTING)
_DETOKENIZE: BodyDecoder[DetokenizeRequest] = BodyDecoder(DetokenizeRequest, ids_field="tokens")


async def serve_tokenize(state: ServerState, exchange: Exchange) -> None:
    """Token ids of a text, or of a conversation after the chat template."""
    state.check_open()
    body = await state.read(exchange, _TOKENIZE)
    state.choose_model(exchange, body.model)
    try:
        token_ids = await _token_ids(state, exchange, body)
        answer: JsonObject = {"count": len(token_ids), "max_model_len": state.llm.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = await state.prompts.token_texts(token_ids)
    except RequestError as error:
        raise refusal_of(error) from None
    if len(token_ids) > SMALL_TOKENS:
        await state.answers.respond_json(exchange, answer)
    else:
        await exchange.respond_json(answer)


async def serve_detokenize(state: ServerState, exchange: Exchange) -> None:
    """Text of token ids."""
    state.check_open()
    body = await state.read(exchange, _DETOKENIZE)
    state.choose_model(exchange, body.model)
    try:
        if len(body.tokens) > most_tokens(state):
            raise InvalidParameter("tokens", f"{len(body.tokens)} ids", f"at most {most_tokens(state)} token ids")
        texts = await state.prompts.decode([body.tokens], "tokens")
    except RequestError as error:
        raise refusal_of(error) from None
    if len(texts[0]) > SMALL_TOKENS:
        await state.answers.respond_json(exchange, {"prompt": texts[0]})
    else:
        await exchange.respond_json({"prompt": texts[0]})


def most_tokens(state: ServerState) -> int:
    """Tokens that one request is told of: texts that are too long for the context are counted too, within reason."""
    return max(state.llm.max_model_len, MAX_TOKENS)


async def _token_ids(state: ServerState, exchange: Exchange, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    if body.prompt is None:
        conversation = await state.parse(
            lambda: conversation_of(body, exchange.ignored, variables=state.template_variables), exchange.body_bytes
        )
        add_defaults(conversation, state.config.default_chat_template_kwargs)
        return await state.prompts.encode_conversation(
            conversation, add_special_tokens=bool(body.add_special_tokens), most=most_tokens(state)
        )
    special = True if body.add_special_tokens is None else body.add_special_tokens
    most = most_tokens(state)
    return (await state.prompts.encode([body.prompt], add_special_tokens=special, param="prompt", most=most))[0]
