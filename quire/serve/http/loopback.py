"""A request to one of this server's own endpoints, without a connection: how lines of a batch are answered.

The endpoint is the same one that HTTP reaches, so the same checks hold. Does not own batches.
Invariant: exactly one answer comes back, whatever the endpoint raises.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.core.errors import GrammarsBusy
from quire.serve.http.exchange import AsgiMessage, Exchange
from quire.serve.http.keys import Tenant
from quire.serve.http.refusal import internal_error

Run = Callable[[Exchange], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class LoopbackReply:
    """A whole answer. `body` is JSON."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: int = 0
    """What a busy server says of when to come again; 0: nothing."""

    @property
    def is_busy(self) -> bool:
        """True if the same request may succeed later: the server is full, restarting or going down."""
        return self.status in (429, 503)

    @property
    def is_tenants_own(self) -> bool:
        """True if it is the tenant alone who has to wait."""
        return self.is_busy and _CODE.decode(self.body).error.code in _OWN_CODES


class _Error(msgspec.Struct):
    code: str | None = None


class _Refused(msgspec.Struct):
    error: _Error


_OWN_CODES = ("rate_limit_exceeded", GrammarsBusy.code)
_CODE = msgspec.json.Decoder(_Refused)


async def ask(run: Run, path: str, body: bytes, tenant: Tenant) -> LoopbackReply:
    """The answer of POST `path` with this JSON body, in the background. Cancelling cancels the work."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    status, retry_after_s, is_whole = 0, 0, False
    parts: list[bytes] = []

    async def receive() -> AsgiMessage:
        if not waiting:  # the client stays until it is answered
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: AsgiMessage) -> None:
        nonlocal status, retry_after_s, is_whole
        if message["type"] == "http.response.start":
            status = message["status"]
            retry_after_s = int(dict(message["headers"]).get(b"retry-after", b"0"))
        else:
            parts.append(message.get("body", b""))
            is_whole = not message.get("more_body", False)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": headers,
    }
    exchange = Exchange(scope, receive, send)
    exchange.is_background, exchange.tenant = True, tenant
    await run(exchange)
    request_id = f"req_{exchange.request_id}"
    if not is_whole:  # what had begun was cut off, as a connection would be
        return LoopbackReply(500, request_id, internal_error().body())
    return LoopbackReply(status, request_id, b"".join(parts), retry_after_s)
