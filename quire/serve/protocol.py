"""uvicorn's httptools protocol with what it lacks: time and size limits for headers, and JSON answers to broken HTTP.

Owns a connection until its headers are complete. Does not own bodies (`exchange.py`) or routes.
Invariants: a connection that sends nothing, or its headers too slowly, is closed after `header_timeout`; the bytes held
for headers are bounded; every request of a connection learns of its loss, also a pipelined one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.serve.config import ServerConfig
from quire.serve.refusal import Refusal, bad_request

logger = logging.getLogger("quire.serve")


class _Stop(Exception):
    """Leaves the parser from inside one of its callbacks; carries the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class QuireProtocol(HttpToolsProtocol):
    """One HTTP/1.1 connection. `limits` is set by `protocol_class`."""

    limits: ServerConfig

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state, _loop=_loop)
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._read_bytes = 0
        self._field_bytes = 0
        self._stop: _Stop | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock: the first headers are due."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection, not only the newest as uvicorn does."""
        self._stop_head_timer()
        cycles = [cycle for cycle, _ in self.pipeline]
        if self._answering is not None:
            cycles.append(self._answering)
        for cycle in cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; answer what it refuses, and headers beyond the limits."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._read_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self._ignore_upgrade(data[error.args[0] :])
        except httptools.HttpParserError:
            self._refuse(
                self._stop.refusal
                if self._stop is not None
                else bad_request("This is not valid HTTP.", code="bad_http")
            )
        else:
            if self._in_head and self._read_bytes > self.limits.max_header_bytes:
                self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        """A request starts: its headers are due within the time limit."""
        super().on_message_begin()
        self.scope["extensions"] = {"quire.abort": {"call": self.transport.abort}}
        self._in_head, self._read_bytes, self._field_bytes = True, 0, 0
        self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        """Count a piece of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count one header field."""
        self._count_head(len(name) + len(value) + 4)
        if len(self.headers) >= self.limits.max_headers:
            raise self._stopped(Refusal(431, f"More than {self.limits.max_headers} headers.", code="too_many_headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Headers are there: the clock stops, the request starts."""
        self._in_head = False
        self._stop_head_timer()
        if self.parser.should_upgrade():
            return  # the parser stops behind the headers; `_ignore_upgrade` goes on
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Take a request that offers another protocol (Java's client offers h2c with its body) without the offer."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(bad_request("CONNECT is not served.", code="bad_http"))
            return
        kept = [pair for pair in self.headers if pair[0] not in {b"upgrade", b"connection", b"http2-settings"}]
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self.url, b"".join(b"%b: %b\r\n" % pair for pair in kept))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _count_head(self, n_bytes: int) -> None:
        # Fields count here, unfinished ones in `_read_bytes`: a field is reported only when it is complete.
        self._field_bytes += n_bytes
        if self._field_bytes > self.limits.max_header_bytes:
            raise self._stopped(self._head_too_large())

    def _head_too_large(self) -> Refusal:
        return Refusal(
            431, f"The headers are longer than {self.limits.max_header_bytes} bytes.", code="headers_too_large"
        )

    def _stopped(self, refusal: Refusal) -> _Stop:
        self._stop = _Stop(refusal)
        return self._stop

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._answering is not None and not self._answering.response_complete:
            return  # the late headers are of a pipelined request; the one before is still being answered
        self._refuse(Refusal(408, "The request headers did not arrive in time.", code="timeout"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without the application and close. A response under way is cut, so nothing is mixed into it."""
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        logger.debug("refused a connection: %s", refusal.message)
        cycle = self._answering
        if cycle is not None and not cycle.response_started and cycle is self.cycle and cycle.more_body:
            cycle.disconnected = True  # its body is broken: this answer takes the place of the application's
            cycle.message_event.set()
            self.transport.write(raw_answer(refusal))
        elif cycle is None or cycle.response_complete:
            self.transport.write(raw_answer(refusal))
        self.transport.close()


def raw_answer(refusal: Refusal) -> bytes:
    """A complete HTTP/1.1 response for `refusal`, with `connection: close`."""
    body = refusal.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", f"req_{secrets.token_hex(12)}".encode()),
        (b"connection", b"close"),
        *((name, value) for name, value in refusal.headers() if name != b"connection"),
    ]
    lines = [STATUS_LINE[refusal.status], *(b"%s: %s\r\n" % pair for pair in headers), b"\r\n", body]
    return b"".join(lines)


def protocol_class(limits: ServerConfig) -> type[QuireProtocol]:
    """`QuireProtocol` with these limits, for `uvicorn.Config(http=...)`."""
    return type("QuireProtocol", (QuireProtocol,), {"limits": limits})
