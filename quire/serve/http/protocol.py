"""uvicorn's httptools protocol with what it lacks: limits of time and size, and JSON answers to broken HTTP.

Owns a connection's bytes until they are a request. Does not own bodies (`exchange.py`), routes, nor closing
(`transport.py`). Invariants: requests are parsed one after the other, the next when the one before is answered; what
waits meanwhile is bounded, and so is every part of a request that the parser keeps to itself (a field, a trailer, a
chunk's extension); on a connection that is not being answered a clock runs; no input makes the stack deep.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.serve.config import ServerConfig
from quire.serve.http.cycle import Cycle, OldCycle
from quire.serve.http.refusal import Headers, Refusal, bad_request
from quire.serve.http.target import read_target
from quire.serve.http.transport import BoundedTransport

logger = logging.getLogger("quire.serve")

PIECE_BYTES = 1024
"""The parser gets no more at once: it cannot be stopped between two requests, so few of them may lie in a piece."""
MAX_HELD_BYTES = 64 * 1024
"""Of requests that wait for the one before them; beyond it the connection is not read."""
OFFER_HEADERS = frozenset({b"upgrade", b"http2-settings"})

CountAnswer = Callable[[str, str, int], None]
"""(route, method, status), as `Metrics.count_answer` takes them."""


class _Stop(Exception):
    """Leaves the parser from inside one of its callbacks; carries the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class _Flow(FlowControl):
    """Whether the connection is read. It is not while too much of it is held, whatever a request wishes."""

    is_full = False

    def resume_reading(self) -> None:
        """Read on, if there is room."""
        if not self.is_full:
            super().resume_reading()


class QuireProtocol(HttpToolsProtocol):
    """One connection of HTTP/1. `limits` and `count_answer` are set by `protocol_class`."""

    limits: ServerConfig
    count_answer: CountAnswer

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state, _loop=_loop)
        self._bounded: BoundedTransport
        self._reading: _Flow
        self._clock: asyncio.TimerHandle | None = None
        self._held = bytearray()
        self._in_head = False
        self._part_bytes = 0
        """Read since the parser last told of something else than a field."""
        self._has_told = False
        self._field_bytes = 0
        self._n_fields = 0
        self._body_left = 0
        """Of a body whose length was said."""
        self._method, self._version = b"", "1.1"
        self._at_end = self._is_broken = False
        self._stop: _Stop | None = None
        self._due_refusal: Refusal | None = None
        """Of what came behind a request that is still being answered."""
        self._answering: Cycle | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock: the first headers are due."""
        self._bounded = BoundedTransport(transport, self.limits.write_timeout, self._may_send)  # type: ignore[arg-type]
        super().connection_made(self._bounded)  # type: ignore[arg-type]
        self.flow = self._reading = _Flow(self.transport)
        self._set_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection, not only the newest as uvicorn does."""
        self._stop_clock()
        self._bounded.lost()
        self._held.clear()
        cycles = [cycle for cycle, _ in self.pipeline]
        if self._answering is not None:
            cycles.append(self._answering)
        for cycle in cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client closed its side: it has left."""
        self._at_end = True
        self._bounded.ended()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        super().pause_writing()
        self._bounded.set_paused(True)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._bounded.set_paused(False)

    def data_received(self, data: bytes) -> None:
        """Take what came; it is parsed when its turn comes."""
        if self.transport.is_closing():
            return
        self._held += data
        self._parse()

    def on_response_complete(self) -> None:
        """An answer is out: the next request, an idle connection, or its end."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._due_refusal is not None:
            self._refuse(self._due_refusal)
            return
        self._parse()
        self._set_clock()
        if self.cycle is not None and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    # ---- parsing

    def _parse(self) -> None:
        """Parse what is held, until a request is complete and waits for its answer."""
        while self._held and not self._is_occupied() and not self.transport.is_closing():
            piece = bytes(memoryview(self._held)[: self._body_left or PIECE_BYTES])
            n_used, refusal = self._feed(piece)
            del self._held[:n_used]
            if refusal is not None:
                self._held.clear()
                self._refuse(refusal)
        self._reading.is_full = len(self._held) > MAX_HELD_BYTES
        if self._reading.is_full:
            self.flow.pause_reading()

    def _is_occupied(self) -> bool:
        """True while the newest request is complete and not answered, or what follows it was refused."""
        cycle = self.cycle
        is_waiting = cycle is not None and not cycle.more_body and not cycle.response_complete
        return is_waiting or self._due_refusal is not None

    def _feed(self, piece: bytes) -> tuple[int, Refusal | None]:
        """Parse a piece; returns how much of it was used, and the answer to what cannot be parsed."""
        self._has_told, n_used = False, len(piece)
        try:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                n_used = offer.args[0]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head_without_offer(self._method, self.url, self._version, self.headers))
        except httptools.HttpParserError:
            stop = self._stop
            return n_used, stop.refusal if stop is not None else bad_request("This is not valid HTTP.", code="bad_http")
        self._part_bytes = 0 if self._has_told else self._part_bytes + n_used
        return n_used, self._head_too_large() if self._part_bytes > self.limits.max_header_bytes else None

    # ---- what the parser tells

    def on_message_begin(self) -> None:
        """A request starts: its headers are due within the time limit."""
        super().on_message_begin()
        self._in_head, self._has_told = True, True
        self._field_bytes = self._n_fields = self._body_left = 0
        self._set_clock()

    def on_url(self, url: bytes) -> None:
        """Count a piece of the request line."""
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one field of the head. Trailers are counted and dropped: they come when the request has been judged."""
        self._count_field(len(name) + len(value) + 4)
        self._n_fields += 1
        if self._n_fields > self.limits.max_headers:
            raise self._stopped(Refusal(431, f"More than {self.limits.max_headers} headers.", code="too_many_headers"))
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there: the clock stops, the request starts."""
        self._in_head, self._has_told = False, True
        self._method, self._version = self.parser.get_method(), self.parser.get_http_version()
        if self._method == b"CONNECT":
            raise self._stopped(bad_request("CONNECT is not served.", code="bad_http"))
        if self._version not in ("1.0", "1.1"):
            message = f"HTTP/1.1 and HTTP/1.0 are served, not HTTP/{self._version}."
            raise self._stopped(bad_request(message, code="bad_http"))
        if self.parser.should_upgrade():
            return  # the parser stops behind the headers; `_feed` goes on
        self._complete_scope()
        cycle = self._make_cycle()
        existing, self.cycle = self.cycle, cycle
        if existing is None or existing.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))
        self._stop_clock()

    def on_chunk_header(self) -> None:
        """A chunk's size and extension are there."""
        self._has_told = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._has_told = True
        self._body_left = max(0, self._body_left - len(body))
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._has_told = True
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _complete_scope(self) -> None:
        try:
            target = read_target(self.url, self._method)
        except Refusal as refusal:
            raise self._stopped(refusal) from None
        if target.authority is not None:
            pairs = ((name, target.authority if name == b"host" else value) for name, value in self.headers)
            self.headers[:] = pairs
        lengths = [value for name, value in self.headers if name == b"content-length"]
        self._body_left = int(lengths[0]) if lengths else 0  # a number: the parser has seen to it
        self.scope |= {
            "method": self._method.decode("ascii"),
            "http_version": self._version,
            "path": target.path.decode("ascii"),
            "raw_path": target.path,
            "query_string": target.query,
        }

    def _make_cycle(self) -> Cycle:
        kind = Cycle if self._version == "1.1" else OldCycle
        return kind(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=self._version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    # ---- limits

    def _count_field(self, n_bytes: int) -> None:
        # Fields count here, unfinished ones in `_part_bytes`: a field is reported only when it is complete.
        self._field_bytes += n_bytes
        if self._field_bytes > self.limits.max_header_bytes:
            raise self._stopped(self._head_too_large())

    def _head_too_large(self) -> Refusal:
        limit = self.limits.max_header_bytes
        return Refusal(431, f"The headers are longer than {limit} bytes.", code="headers_too_large")

    def _stopped(self, refusal: Refusal) -> _Stop:
        self._stop = _Stop(refusal)
        return self._stop

    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _set_clock(self) -> None:
        """One clock: for a head that is due, or for a connection that is idle; none while a request is answered."""
        self._stop_clock()
        if self._is_answering() or self.transport.is_closing():
            return
        if self._in_head or self.cycle is None:
            self._clock = self.loop.call_later(self.limits.header_timeout, self._head_is_late)
        else:
            self._clock = self.loop.call_later(self.limits.keep_alive_timeout, self.transport.close)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _head_is_late(self) -> None:
        self._refuse(Refusal(408, "The request headers did not arrive in time.", code="timeout"))

    def _may_send(self) -> bool:
        """Whether the client may send more of what will not be read: then closing takes its time."""
        has_more = self._is_broken or self._held or (self.cycle is not None and self.cycle.more_body)
        return bool(has_more) and not self._at_end

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without the application and close, once what is being answered is done."""
        self._stop_clock()
        if self.transport.is_closing():
            return
        logger.debug("refused a connection: %s", refusal.message)
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            is_own = cycle is self.cycle and cycle.more_body and not cycle.response_started
            if not is_own:
                self._due_refusal = refusal
                return
            cycle.refused_status = refusal.status
            cycle.disconnected = True  # its body is broken: this answer takes the place of the application's
            cycle.message_event.set()
        else:
            self.count_answer("other", "other", refusal.status)
        self._is_broken = refusal.status != 408
        self.transport.write(raw_answer(refusal, is_head=self.parser.get_method() == b"HEAD"))
        self.transport.close()


def head_without_offer(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """The head of a request that offers another protocol (Java's client offers h2c with its body), without the offer:
    behind a head with one the parser stops."""
    fields = []
    for name, value in headers:
        if name == b"connection":
            words = [word.strip() for word in value.split(b",")]
            value = b", ".join(word for word in words if word.lower() not in OFFER_HEADERS)
        if name not in OFFER_HEADERS:
            fields.append(b"%b: %b\r\n" % (name, value))
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(fields))


def raw_answer(refusal: Refusal, *, is_head: bool = False) -> bytes:
    """A complete HTTP/1.1 response for `refusal`, with `connection: close`; to HEAD without the body."""
    body = refusal.body()
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", f"req_{secrets.token_hex(12)}".encode()),
        (b"connection", b"close"),
        *((name, value) for name, value in refusal.headers() if name != b"connection"),
    ]
    fields = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    return b"%b%b\r\n%b" % (STATUS_LINE[refusal.status], fields, b"" if is_head else body)


def protocol_class(limits: ServerConfig, count_answer: CountAnswer) -> type[QuireProtocol]:
    """`QuireProtocol` with these limits, for `uvicorn.Config(http=...)`; answers given here are counted too."""
    members = {"limits": limits, "count_answer": staticmethod(count_answer)}
    return type("QuireProtocol", (QuireProtocol,), members)
