"""The two APIs that clients speak, told apart by path: how each words an error, and where it puts its key.

Owns the shape of Anthropic's errors. Does not own which error it is (`refusal.py`).
Invariant: the dialect depends on the path alone, so it is known before any check of the request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from quire.serve.http.refusal import Headers, Refusal

ANTHROPIC_PATH = "/v1/messages"

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
    plain_key_header: bytes | None = None
    """A header besides Authorization that may carry the key, bare."""


def dialect_of(path: str) -> Dialect:
    """The dialect of whoever asks for this path, as it was sent."""
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    return ANTHROPIC if is_anthropic else OPENAI


def _openai_body(refusal: Refusal, _request_id: str) -> bytes:
    return refusal.body()


def _openai_event(refusal: Refusal, _request_id: str) -> bytes:
    return b"data: " + refusal.body() + b"\n\n"


def _anthropic_body(refusal: Refusal, request_id: str) -> bytes:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    default = "api_error" if refusal.status >= 500 else "invalid_request_error"
    message = refusal.message
    if refusal.param is not None and refusal.param not in message:  # there is no other place for the field's name
        message = f"{refusal.param}: {message}"
    error = {"type": _ANTHROPIC_KINDS.get(refusal.status, default), "message": message}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def _anthropic_event(refusal: Refusal, request_id: str) -> bytes:
    return b"event: error\ndata: " + _anthropic_body(refusal, request_id) + b"\n\n"


OPENAI = Dialect(_openai_body, _openai_event, lambda _: [])
ANTHROPIC = Dialect(
    _anthropic_body,
    _anthropic_event,
    lambda request_id: [(b"request-id", request_id.encode())],
    plain_key_header=b"x-api-key",
)
