"""HTTP errors: one exception, one body shape. Owns the mapping from Quire's exceptions to status, type and code.

Invariants: a message is a fixed text or names the client's own value, cut to `MAX_MESSAGE_CHARS`; it never holds an
address, a path, a traceback or another user's data. Never 422.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from quire.core.errors import (
    ContextLengthExceeded,
    EngineAsleep,
    EngineDead,
    EngineError,
    EngineLost,
    GrammarsBusy,
    QueueFull,
    QuireError,
    RequestError,
    RequestExpired,
    SleepFailed,
    shown,
)
from quire.core.failure import Code

MAX_MESSAGE_CHARS = 600
MISSING = "missing_required_parameter"
RETRY_AFTER_S = 2
"""What `Retry-After` says for an overloaded or not yet ready server; openai-python ignores more than 120."""

Headers = list[tuple[bytes, bytes]]


class Refusal(Exception):
    """An HTTP error answer. `kind` is the body's `type`; `close` ends the connection after the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Headers | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.extra_headers = headers or []
        self.close = close

    @property
    def kind(self) -> str:
        """The `type` of the error body."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """`{"error": {...}}` as JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> Headers:
        """Headers that belong to the error: Retry-After, x-should-retry, connection."""
        found = list(self.extra_headers)
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(self.retry_after_s).encode()))
        elif self.status >= 500 or self.status == 409:
            found.append((b"x-should-retry", b"false"))
        if self.close:
            found.append((b"connection", b"close"))
        return found


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> Refusal:
    """A 400."""
    return Refusal(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> Refusal:
    """A 400 for a field that is known but not honoured."""
    return Refusal(400, f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def unknown_model(name: str, names: Iterable[str]) -> Refusal:
    """404 for a model that is none of `names`, which this server has."""
    message = f"The model {shown(name)} does not exist here. This server has: {', '.join(names)}."
    return Refusal(404, message, param="model", code="model_not_found")


def naming_models(refusal: Refusal, names: Sequence[str]) -> Refusal:
    """The same, or if it is for a request that names no model one that says which this server has."""
    if not names or (refusal.param, refusal.code) != ("model", MISSING):
        return refusal
    return bad_request(f"{refusal.message} This server has: {', '.join(names)}.", refusal.param, MISSING)


def too_large(limit: int) -> Refusal:
    """413; closes, because the rest of the body is not read."""
    message = f"The request body is longer than {limit} bytes: send less in one, or raise --max-body-bytes."
    return Refusal(413, message, code="content_too_large", close=True)


def unavailable(code: str, message: str) -> Refusal:
    """503 with Retry-After."""
    return Refusal(503, message, code=code, retry_after_s=RETRY_AFTER_S)


def internal_error() -> Refusal:
    """500 with a fixed text."""
    return Refusal(500, "The server failed while it handled this request.", code="internal_error")


def refusal_of(error: QuireError, renamed: dict[str, str] | None = None) -> Refusal:
    """The HTTP answer for one of Quire's exceptions; `renamed` maps an engine's field name to the request's."""
    param = error.param
    message = error.message
    if param is not None and renamed is not None and param in renamed:
        message = message.replace(param, renamed[param], 1) if message.startswith(param) else message
        param = renamed[param]
    if isinstance(error, QueueFull):
        return Refusal(429, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, GrammarsBusy | EngineAsleep):
        return unavailable(error.code, message)
    if isinstance(error, ContextLengthExceeded):
        return Refusal(400, message, param=param, code="context_length_exceeded")
    if isinstance(error, RequestExpired):
        if error.code == "queue_timeout":
            return unavailable(error.code, message)
        return Refusal(408, message, code=error.code)
    if isinstance(error, RequestError):
        status = 404 if error.code == Code.MODEL_NOT_FOUND else 400
        return Refusal(status, message, param=param, code=error.code)
    if isinstance(error, EngineDead):
        return unavailable("engine_dead", "The engine has stopped; the server is going down.")
    if isinstance(error, EngineLost):
        return unavailable("engine_lost", "The engine stopped and is being started again: send the request again.")
    if isinstance(error, SleepFailed):
        return Refusal(500, message, code=error.code)
    if isinstance(error, EngineError):
        return Refusal(500, "The engine failed while it served this request.", code=error.code)
    return internal_error()
