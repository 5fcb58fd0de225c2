"""A live server on a free port, in a thread with its own loop, over the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import uvloop
from serve_fakes import FakeEngine, make_llm

from quire.engine.async_llm import AsyncLLM
from quire.serve.config import ServerConfig
from quire.serve.http.listener import HttpServer
from quire.serve.server import bind, http_config
from quire.serve.state import ServerState


class LiveServer:
    """The server, its fake engine, and ways to reach both."""

    def __init__(
        self, config: ServerConfig, *, loaded: bool = True, engine: FakeEngine | None = None, **engine_options: Any
    ) -> None:
        self.config = config
        self._loaded = loaded
        self._engine_options = engine_options
        self._listener = bind(config)
        self.port: int = self._listener.getsockname()[1]
        self.base = f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{self.port}"
        self.engine = engine or FakeEngine()
        self.state = ServerState(config)
        self.state.loop_monitor.limit_s = math.inf  # threads of the tests keep the interpreter too
        self.llm: AsyncLLM
        self.loop: asyncio.AbstractEventLoop
        self._http: HttpServer
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), daemon=True)

    def start(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def stop(self) -> None:
        self._http.should_exit = self._http.force_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def client(self, **options: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.config.api_key}"} if self.config.api_key else {}
        return httpx.Client(base_url=self.base, timeout=60, headers=headers, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def exchange(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Send raw bytes; everything that comes back until the connection closes or is silent."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._http = HttpServer(http_config(self.config, self.state), self.config.header_timeout)
        self.llm = await make_llm(self.engine, **self._engine_options)
        if self._loaded:
            self.state.attach(self.llm)
        self._ready.set()
        await self._http.serve(sockets=[self._listener])
        await self.llm.shutdown()


def read_all(connection: socket.socket) -> bytes:
    """Bytes until end or reset."""
    chunks = []
    with contextlib.suppress(OSError):
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)
