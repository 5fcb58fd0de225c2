"""A request to one of this server's own endpoints, without a connection: how lines of a batch are answered.

The endpoint is the same one that HTTP reaches, so the same checks hold. Does not own batches.
Invariant: exactly one answer comes back, whatever the endpoint raises.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from quire.serve.exchange import AsgiMessage, Exchange
from quire.serve.keys import Tenant

Run = Callable[[Exchange], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `body` is JSON."""

    status: int
    request_id: str
    body: bytes

    @property
    def is_busy(self) -> bool:
        """True if the same request may succeed later: the server is full, restarting or going down."""
        return self.status in (429, 503)


async def ask(run: Run, path: str, body: bytes, tenant: Tenant) -> Reply:
    """The answer of POST `path` with this JSON body, in the background. Cancelling cancels the work."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 0, []

    async def receive() -> AsgiMessage:
        if not waiting:  # the client stays until it is answered
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: AsgiMessage) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

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
    return Reply(status, f"req_{exchange.request_id}", b"".join(parts))
