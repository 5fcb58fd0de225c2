"""POST /api/chat and /api/generate, in Ollama's words.

A request is turned into chat's words (`input.py`), so that one set of checks holds for both; a raw prompt is run as it
stands. Answers are lines of JSON unless `stream` is false; errors have Ollama's shape (`http/dialect.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.errors import RequestError
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import Refusal, refusal_of
from quire.serve.ollama.input import check_generate, check_think, served_name, translate_chat, translate_generate
from quire.serve.ollama.replies import OllamaReply
from quire.serve.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from quire.serve.ollama.unused import note_unused
from quire.serve.openai.chat import chat_job
from quire.serve.openai.constraints import structured_outputs
from quire.serve.openai.generation import Job, answer
from quire.serve.openai.naming import Translated, renamed
from quire.serve.openai.validation import check_sequences, sampling_params
from quire.serve.state import ServerState

_CHAT: BodyDecoder[OllamaChatRequest] = BodyDecoder(OllamaChatRequest)
_GENERATE: BodyDecoder[OllamaGenerateRequest] = BodyDecoder(OllamaGenerateRequest)


async def serve_ollama_chat(state: ServerState, exchange: Exchange) -> None:
    """Answer one request for a message, as Ollama's /api/chat."""
    state.check_open()
    body = await state.read(exchange, _CHAT)
    model = served_name(body.model, state.limits.model_names)
    state.choose_model(exchange, model)
    note_unused(body, exchange.ignored)
    if not body.messages:
        await exchange.respond_json(OllamaReply(body.model, None, is_chat=True).loaded())
        return
    await _answer(state, exchange, body, lambda: translate_chat(body, model))


async def serve_ollama_generate(state: ServerState, exchange: Exchange) -> None:
    """Complete one prompt, as Ollama's /api/generate: through the chat template unless it is raw."""
    state.check_open()
    body = await state.read(exchange, _GENERATE)
    model = served_name(body.model, state.limits.model_names)
    state.choose_model(exchange, model)
    check_generate(body)
    note_unused(body, exchange.ignored)
    if not body.prompt:
        await exchange.respond_json(OllamaReply(body.model, None, is_chat=False).loaded())
        return
    await _answer(state, exchange, body, lambda: translate_generate(body, model))


async def _answer(
    state: ServerState,
    exchange: Exchange,
    body: OllamaChatRequest | OllamaGenerateRequest,
    translate: Callable[[], Translated],
) -> None:
    translated = await state.parse(translate, exchange.body_bytes)
    try:
        if isinstance(body, OllamaGenerateRequest) and body.raw:
            job = await _raw_job(state, exchange, body, translated)
        else:
            check_think(body.think, state.style)
            job = await chat_job(state, exchange, translated.chat, translated.names)
        reply = OllamaReply(body.model, job.reader, is_chat=isinstance(body, OllamaChatRequest))
        exchange.silence = reply.silence
        await answer(state, exchange, job, reply, streams=bool(translated.chat.stream))
    except RequestError as error:
        raise refusal_of(error, translated.names) from None
    except Refusal as refusal:
        raise renamed(refusal, translated.names) from None


async def _raw_job(state: ServerState, exchange: Exchange, body: OllamaGenerateRequest, translated: Translated) -> Job:
    """A prompt without the chat template."""
    chat = translated.chat
    translated.names["prompt"] = "prompt"
    params = await state.parse(
        lambda: sampling_params(
            chat,
            state.limits,
            max_tokens=chat.max_tokens,
            logprobs=None,
            prompt_logprobs=None,
            structured=structured_outputs(chat),
        ),
        exchange.body_bytes,
    )
    check_sequences(1, params.n, state.limits)
    prompts = await state.prompts.encode([body.prompt or ""], add_special_tokens=True, param="prompt")
    return Job(exchange.request_id, prompts, params, 0, "")
