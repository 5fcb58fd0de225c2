"""Accepting connections: uvicorn's server without its signal handlers, and with bounds for those that come by TLS.

Owns sockets until a connection is a protocol's. Does not own binding (`server.py`) nor HTTP (`protocol.py`).
Invariants: a TLS handshake ends within its time; at most `MAX_HANDSHAKES` are under way, beyond which the oldest goes:
an honest client needs two round trips, so that those who open connections and say nothing push out each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

logger = logging.getLogger("quire.serve")

MAX_HANDSHAKES = 1000
MAX_ACCEPTS = 64
"""Connections taken at once, so that a flood of them leaves the others their turns."""
REST_S = 1.0
"""Pause after the system had no descriptor or memory for a connection."""
TLS_CLOSE_S = 5.0
"""How long a client may take to confirm the end of a TLS connection."""


class TlsListener:
    """Accepts on one socket; stands where uvicorn has an `asyncio.Server`."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        handshake_s: float,
        backlog: int,
    ) -> None:
        """handshake_s: longest handshake; backlog: of the socket, which need not listen yet."""
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self.handshakes: dict[asyncio.Task[None], None] = {}
        """Those under way, the oldest first."""
        listener.setblocking(False)
        listener.listen(backlog)
        self._start()

    def close(self) -> None:
        """Accept no more, and end the handshakes."""
        if self._rest is not None:
            self._rest.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
        for task in self.handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait for the handshakes that `close` has ended."""
        if self.handshakes:
            await asyncio.wait(self.handshakes)

    def _start(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("a connection cannot be accepted: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._rest = self._loop.call_later(REST_S, self._start)
                return
            if len(self.handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self.handshakes))
                self.handshakes.pop(oldest)
                oldest.cancel()
            task = self._loop.create_task(self._shake_hands(connection))
            self.handshakes[task] = None
            task.add_done_callback(lambda done: self.handshakes.pop(done, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # of the client's making: a bad record, silence, a reset
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=TLS_CLOSE_S,
            )


class HttpServer(uvicorn.Server):
    """uvicorn's server; signals are left to the service."""

    def __init__(self, config: uvicorn.Config, handshake_s: float) -> None:
        """handshake_s: longest TLS handshake."""
        super().__init__(config)
        self._handshake_s = handshake_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Accept on `sockets`."""
        context = self.config.ssl
        if context is None or sockets is None:
            await super().startup(list(sockets or []))
            return
        options = (context, self._make_protocol, self._handshake_s, self.config.backlog)
        self.servers = [TlsListener(listener, *options) for listener in sockets]  # type: ignore[misc]
        self.started = True

    def _make_protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(self.config, self.server_state, self.lifespan.state)
        return made
