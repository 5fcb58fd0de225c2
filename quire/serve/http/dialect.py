"""The APIs that clients speak, told apart by path: how each words an error, what its streams are, where its key is.

Owns the shape of Anthropic's and Ollama's errors. Does not own which error it is (`refusal.py`).
Invariant: the dialect depends on the path alone, so it is known before any check of the request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from quire.serve.http.refusal import Headers, Refusal

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
THREAD_NOT_FOUND = "thread_not_found"
"""The code that Anthropic's clients look for in an error's `details`, and then send the whole conversation."""
LINES = b"application/x-ndjson"
"""A stream of JSON values, one a line."""
FORM = "application/x-www-form-urlencoded"
"""What curl calls a body unless it is told what it is."""

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """One API's manner."""

    error_body: Callable[[Refusal, str], bytes]
    """(refusal, request id) → the JSON of an error answer."""
    error_event: Callable[[Refusal, str], bytes]
    """The same as the last event of a stream that began well."""
    answer_headers: Callable[[str], Headers]
    """Headers of every answer, from the request id."""
    error_name: str = "Error"
    """Of their shape in the OpenAPI document."""
    plain_key_header: bytes | None = None
    """A header besides Authorization that may carry the key, bare."""
    stream_media: bytes = EVENT_STREAM
    """Content type of streams."""
    silence: bytes = b": keep-alive\n\n"
    """What a stream says that has nothing to say."""
    untold_media: str | None = None
    """A content type with which JSON bodies come too."""


def dialect_of(path: str) -> Dialect:
    """The dialect of whoever asks for this path, as it was sent."""
    if path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/"):
        return ANTHROPIC
    return OLLAMA if path.startswith(OLLAMA_PATH + "/") else OPENAI


def _openai_body(refusal: Refusal, _request_id: str) -> bytes:
    return refusal.body()


def _openai_event(refusal: Refusal, _request_id: str) -> bytes:
    return b"data: " + refusal.body() + b"\n\n"


def _anthropic_body(refusal: Refusal, request_id: str) -> bytes:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`; `details` for a code that clients act on."""
    default = "api_error" if refusal.status >= 500 else "invalid_request_error"
    message = refusal.message
    if refusal.param is not None and refusal.param not in message:  # there is no other place for the field's name
        message = f"{refusal.param}: {message}"
    error: dict[str, Any] = {"type": _ANTHROPIC_KINDS.get(refusal.status, default), "message": message}
    if refusal.code == THREAD_NOT_FOUND:
        error["details"] = {"error_code": refusal.code}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def _anthropic_event(refusal: Refusal, request_id: str) -> bytes:
    return b"event: error\ndata: " + _anthropic_body(refusal, request_id) + b"\n\n"


def _ollama_body(refusal: Refusal, _request_id: str) -> bytes:
    """`{"error": message}`."""
    message = refusal.message
    if refusal.param is not None and refusal.param not in message:
        message = f"{refusal.param}: {message}"
    return msgspec.json.encode({"error": message})


def _ollama_line(refusal: Refusal, request_id: str) -> bytes:
    return _ollama_body(refusal, request_id) + b"\n"


OPENAI = Dialect(_openai_body, _openai_event, lambda _: [])
ANTHROPIC = Dialect(
    _anthropic_body,
    _anthropic_event,
    lambda request_id: [(b"request-id", request_id.encode())],
    error_name="AnthropicError",
    plain_key_header=b"x-api-key",
)
OLLAMA = Dialect(
    _ollama_body,
    _ollama_line,
    lambda _: [],
    error_name="OllamaError",
    stream_media=LINES,
    silence=b"",
    untold_media=FORM,
)
