"""One HTTP request and its answer, on the raw ASGI interface. Owns ids, body reading with limits, and writing.

Does not own streams' pacing (`delivery.py`) nor routes. Invariants: the answer carries `x-request-id`, which is ours; a
client's label is echoed only if it is plain; a body that was not read closes the connection; an answer whose client had
left before it began has the status 499, in logs and metrics alone.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import msgspec

from quire.serve.http.dialect import dialect_of
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.keys import NOBODY
from quire.serve.http.refusal import Headers, Refusal, bad_request, too_large

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]

JSON = b"application/json"

LONG_BODY_BYTES = 1 << 20
"""Pieces of longer bodies are joined in a thread."""

_LABEL = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")
_JSON_TYPE = re.compile(r'application/json\s*(;\s*charset="?utf-?8"?\s*)?;?', re.IGNORECASE)


CLIENT_LEFT = 499
"""Status of a request whose client left before it was answered, as nginx has it. Never sent."""


class ClientGone(Exception):
    """The client closed the connection; nobody is there to be answered."""


class Link(Protocol):
    """What the HTTP server tells of a request's connection, as `extensions["quire.link"]` of the scope."""

    @property
    def is_lost(self) -> bool:
        """True if the connection ended before an answer was complete."""

    response_started: bool
    """True once a status line was sent."""
    refused_status: int
    """Status of the answer that was given in the application's place to what was no HTTP; 0: none."""

    def abort(self) -> None:
        """Cut the connection, dropping what the client has not read."""


class Exchange:
    """A request, and the way to answer it exactly once."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.request_id = secrets.token_hex(12)
        self.path: str = scope["raw_path"].decode("latin-1")
        """The path as it was sent, by which everything is decided."""
        self.dialect = dialect_of(self.path)
        self.error_event: Callable[[Refusal], bytes] | None = None
        """How a stream that has begun words its failure, where it is not the dialect's own way."""
        self.silence: Callable[[], bytes] | None = None
        """What keeps a stream alive that has nothing to say, where it is not the dialect's own."""
        self.tenant = NOBODY
        """Whose key came with the request."""
        self.adapter = ""
        """Name of the adapter that the body names as its model; empty: the model itself."""
        self.route = "other"
        """The route's path pattern once it is known, for logs and metrics."""
        self.status = 0
        """Status of the answer, 0 before it starts."""
        self.more_headers: Headers = []
        """Headers that the answer has besides those of its endpoint."""
        self.ignored = IgnoredParams()
        """Fields of the body that do nothing."""
        self.is_background = False
        """True for work that may only use what others leave."""
        self.body_bytes = 0
        """Length of the body once it is read."""
        self._body_read = not self._announces_body()
        self._link: Link | None = scope.get("extensions", {}).get("quire.link")
        self._is_stream = False
        """The answer that began is a stream, which can end with an error."""

    @property
    def started(self) -> bool:
        """True once the status line is out."""
        return self.status != 0

    @property
    def client_left(self) -> bool:
        """True if the connection was lost before the answer was complete."""
        return self._link is not None and self._link.is_lost

    def settle(self) -> None:
        """Give a request whose answer nobody saw its status."""
        link = self._link
        if not self.started or (link is not None and not link.response_started):
            self.status = (link.refused_status if link is not None else 0) or CLIENT_LEFT

    def header(self, name: bytes) -> list[bytes]:
        """All values of a header; `name` in lower case."""
        return [value for key, value in self.scope["headers"] if key == name]

    async def read_body(self, limit: int, timeout_s: float, grow: Callable[[int], None]) -> bytes:
        """The whole JSON body. Raises Refusal 408, 413 or 415, ClientGone if the client leaves meanwhile. grow: is told
        how many bytes there are so far, and may raise."""
        self._check_media()
        declared = self._declared_length()
        if declared is not None and declared > limit:
            raise too_large(limit)
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._collect(limit, grow)
        except TimeoutError:
            raise Refusal(408, "The request body did not arrive in time.", code="timeout", close=True) from None
        self._body_read = True
        self.body_bytes = len(body)
        return body

    async def read_chunks(self, limit: int, idle_s: float, total_s: float) -> AsyncIterator[bytes]:
        """The body as it comes, whatever its type. Raises Refusal 408 when it stops coming or takes too long, 413, or
        ClientGone."""
        declared = self._declared_length()
        if declared is not None and declared > limit:
            raise too_large(limit)
        deadline_s = asyncio.get_running_loop().time() + total_s
        more = True
        while more:
            try:
                async with asyncio.timeout_at(min(deadline_s, asyncio.get_running_loop().time() + idle_s)):
                    message = await self.receive()
            except TimeoutError:
                raise Refusal(408, "The request body did not arrive in time.", code="timeout", close=True) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            self.body_bytes += len(chunk)
            if self.body_bytes > limit:
                raise too_large(limit)
            more = message.get("more_body", False)
            yield chunk
        self._body_read = True

    async def start(self, status: int, content_type: bytes, headers: Headers, n_bytes: int | None = None) -> None:
        """Send status line and headers; `n_bytes` None means that what follows ends itself, or nothing follows."""
        self.status, self._is_stream = status, content_type == self.dialect.stream_media
        request_id = f"req_{self.request_id}"
        all_headers = [(b"content-type", content_type), (b"x-request-id", request_id.encode())]
        all_headers += self.dialect.answer_headers(request_id)
        all_headers += self.more_headers + self.ignored.headers()
        label = self.header(b"x-request-id")
        if len(label) == 1 and _LABEL.fullmatch(label[0]):
            all_headers.append((b"x-client-request-id", label[0]))
        if n_bytes is not None:
            all_headers.append((b"content-length", str(n_bytes).encode()))
        if not self._body_read and not any(name == b"connection" for name, _ in headers):
            all_headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": status, "headers": [*all_headers, *headers]})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the body; waits while the client reads too slowly."""
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def respond(
        self, status: int, data: bytes, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """A whole answer."""
        n_bytes = None if status in (204, 304) else len(data)  # these have no body whose length could be said
        await self.start(status, content_type, [(b"x-content-type-options", b"nosniff"), *(headers or [])], n_bytes)
        await self.write(data, more=False)

    async def respond_json(self, value: Any) -> None:
        """200 with `value` as JSON."""
        await self.respond(200, msgspec.json.encode(value))

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error: a status if nothing was sent yet, else as the last event of the stream. Another answer
        that has begun is cut off, lest it be taken for a whole one."""
        request_id = f"req_{self.request_id}"
        if not self.started:
            body = self.dialect.error_body(refusal, request_id)
            await self.respond(refusal.status, body, headers=refusal.headers())
        elif not self._is_stream:
            await self.abort()
        elif self.error_event is not None:
            await self.write(self.error_event(refusal), more=False)
        else:
            await self.write(self.dialect.error_event(refusal, request_id), more=False)

    async def abort(self) -> None:
        """Cut the connection, dropping what the client has not read."""
        if self._link is not None:
            self._link.abort()
        await asyncio.sleep(0)

    def _announces_body(self) -> bool:
        lengths = self.header(b"content-length")
        return bool(self.header(b"transfer-encoding")) or any(value != b"0" for value in lengths)

    def _check_media(self) -> None:
        types = [media.decode("latin-1").strip() for media in self.header(b"content-type")]
        is_json = len(types) == 1 and (types[0] == self.dialect.untold_media or _JSON_TYPE.fullmatch(types[0]))
        if not is_json:
            raise Refusal(415, "Send content-type: application/json, in UTF-8.", code="unsupported_media_type")
        if any(value.lower() != b"identity" for value in self.header(b"content-encoding")):
            raise Refusal(415, "Send the body without content-encoding.", code="unsupported_media_type")

    def _declared_length(self) -> int | None:
        declared = self.header(b"content-length")
        if any(not value.isdigit() for value in declared):
            raise bad_request("content-length is not a number.", code="invalid_content_length")
        return int(declared[0]) if declared else None

    async def _collect(self, limit: int, grow: Callable[[int], None]) -> bytes:
        chunks: list[bytes] = []
        n_bytes = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            n_bytes += len(chunk)
            if n_bytes > limit:
                raise too_large(limit)
            grow(n_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                break
        if n_bytes < LONG_BODY_BYTES:
            return b"".join(chunks)
        return await asyncio.to_thread(b"".join, chunks)  # from a megabyte on it lets go of the interpreter
