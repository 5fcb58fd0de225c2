"""Life of a server process: claim the port, load the engine, serve, drain, leave.

Owns exit codes, what is printed, and what signals (`signals.py`) lead to. Does not own HTTP or the engine.
Invariants: a taken port is reported before anything is loaded; the engine process never outlives this one; Ctrl-C
never shows a traceback. Exit codes: 0 after SIGINT or SIGTERM, 1 engine lost, also while it was started, or nobody left
to serve, 2 bad options, port or checkpoint, 130 when a second signal cut the drain short, and after SIGINT before
anything was served, as any command that is interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
import uvloop

from quire.config.engine import EngineConfig
from quire.config.flags import in_flags
from quire.core.errors import ConfigError, LoadError, QuireError, complaint
from quire.engine import logs
from quire.engine.async_llm import AsyncLLM
from quire.engine.garbage import SMALL_HEAP_THRESHOLDS, quiet_gc
from quire.engine.supervisor import ENGINE_COMMAND
from quire.serve.api_processes import (
    EXIT_BAD_OPTIONS,
    EXIT_FAILED,
    EXIT_FORCED,
    EXIT_OK,
    ApiProcesses,
    code_before_serving,
)
from quire.serve.app import App
from quire.serve.config import ServerConfig
from quire.serve.http.keys import KeyRing
from quire.serve.http.listener import HttpServer
from quire.serve.http.protocol import protocol_class
from quire.serve.http.refusal import unavailable
from quire.serve.signals import ignore_hangups_until_served, on_signals
from quire.serve.state import ServerState

logger = logging.getLogger("quire.serve")

BACKLOG = 2048
WATCH_S = 0.2
CLOSE_S = 3.0
"""Seconds for answers to leave and the engine to stop once no work is left or it was cut off."""


def run(engine: EngineConfig, server: ServerConfig, engine_command: tuple[str, ...] = ENGINE_COMMAND) -> int:
    """Serve until a signal; returns the exit code. Prints errors and the address to stderr and stdout.

    engine_command: what Python runs instead of the engine's own module; for tests and benchmarks.
    """
    try:
        prepare_process()
        engine.verify()
        server.verify()
        KeyRing(server.api_key, server.api_key_file)
        listener = bind(server)
    except ConfigError as error:
        return fail(error, EXIT_BAD_OPTIONS)
    if server.api_processes > 1:
        return _run_api_processes(engine, server, listener, engine_command)
    return run_service(Service(server, listener, lambda: AsyncLLM.create(engine, engine_command)))


def run_service(service: Service) -> int:
    """Run one process that serves HTTP; returns the exit code."""
    try:
        http = HttpServer(http_config(service.server, service.state), service.server.header_timeout)
    except ConfigError as error:
        return fail(error, EXIT_BAD_OPTIONS)
    with service.listener, contextlib.suppress(KeyboardInterrupt), _runner() as runner:
        return runner.run(service.serve(http))
    return EXIT_FORCED


def _run_api_processes(
    engine: EngineConfig, server: ServerConfig, listener: socket.socket, engine_command: tuple[str, ...]
) -> int:
    """`listener` has shown that the port is ours; from now on it is shared, and held by a socket that never listens."""
    host, server.port = listener.getsockname()[:2]
    listener.close()
    try:
        http_config(server, ServerState(server))  # a bad certificate is said before anything starts
        holder = bind(server, shared=True, listens=False)
    except ConfigError as error:
        return fail(error, EXIT_BAD_OPTIONS)
    warn_if_open(server, host)
    address = f"{address_of(server, host, server.port)} with {server.api_processes} processes"
    with holder, contextlib.suppress(KeyboardInterrupt), _runner() as runner:
        try:
            processes = ApiProcesses(engine, server, engine_command)
            return runner.run(processes.run(f"Quire serves at {address} (Ctrl-C stops)"))
        except (ConfigError, LoadError) as error:
            return fail(error, EXIT_BAD_OPTIONS)
        except QuireError as error:
            return fail(error, EXIT_FAILED)
    return EXIT_FORCED


def _runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def bind(server: ServerConfig, *, shared: bool = False, listens: bool = True) -> socket.socket:
    """A socket bound to the address. `shared`: with other processes of this server. ConfigError if it is taken."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.port))
        if listens:
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {server.port} of {server.host} is in use: stop what uses it, or choose another --port"
            ) from None
        raise ConfigError(f"cannot listen on {server.host} port {server.port}: {error.strerror or error}") from None
    return listener


def prepare_process() -> None:
    """Standard files, log and signals of a process that serves; file descriptors up to the hard limit. ConfigError for
    a log level that there is not."""
    logs.set_up()
    ignore_hangups_until_served()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the system allows less than the hard limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def address_of(server: ServerConfig, host: str, port: int) -> str:
    """The URL of the server."""
    return f"{'https' if server.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def warn_if_open(server: ServerConfig, host: str) -> None:
    """Say loudly that others can use the server without a key."""
    if server.is_public and server.api_key is None and not server.api_key_file:
        logger.warning(
            "ANYONE WHO REACHES %s CAN USE THIS SERVER: it listens on the network without an API key "
            "(set --api-key or QUIRE_API_KEY, or use --host 127.0.0.1)",
            host,
        )


def http_config(server: ServerConfig, state: ServerState) -> uvicorn.Config:
    """uvicorn's options. Raises ConfigError if the certificate or its key cannot be used."""
    config = uvicorn.Config(
        App(state),
        http=protocol_class(server, state.metrics.count_answer),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level=server.uvicorn_log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=server.keep_alive_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=1,
        ssl_certfile=server.ssl_certfile or None,
        ssl_keyfile=server.ssl_keyfile or None,
    )
    try:
        config.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"ssl_certfile and ssl_keyfile cannot be used: {error}") from None
    return config


class Service:
    """One server from its first to its last second."""

    def __init__(
        self,
        server: ServerConfig,
        listener: socket.socket,
        load: Callable[[], Coroutine[Any, Any, AsyncLLM]],
        *,
        on_ready: Callable[[], None] | None = None,
        on_refused: Callable[[QuireError], None] | None = None,
        beside: Callable[[Service], Coroutine[Any, Any, None]] | None = None,
        listens_late: bool = False,
        on_reload: Callable[[], None] | None = None,
    ) -> None:
        """load: starts the engine, or connects to it. For one of several processes, whose parent says the address and
        cuts short: on_ready, called instead when requests are served; on_refused, called instead of a message when the
        model or an option cannot be used; beside, what runs from the first second to the
        last; listens_late: connections come only once they can be served, as others serve meanwhile.
        on_reload: called at SIGHUP too."""
        self.server = server
        self.listener = listener
        self._load_llm = load
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._beside = beside
        self._listens_late = listens_late
        self._on_reload = on_reload
        self._first_signal = 0
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self.state = ServerState(server)

    async def serve(self, http: HttpServer) -> int:
        """Load, serve, drain; returns the exit code."""
        on_signals(self._on_signal, self.reload)
        beside = asyncio.create_task(self._beside(self)) if self._beside is not None else None
        serving = None if self._listens_late else asyncio.create_task(http.serve(sockets=[self.listener]))
        llm: AsyncLLM | None = None
        try:
            llm = await self._load()
            if serving is None and llm is not None:
                serving = asyncio.create_task(http.serve(sockets=[self.listener]))
            code = code_before_serving(self._first_signal) if llm is None else await self._watch(llm)
            await self._drain()
        except (ConfigError, LoadError) as error:
            code = EXIT_BAD_OPTIONS
            (self._on_refused or say)(error)
        except QuireError as error:
            code = fail(error, EXIT_FAILED)
        finally:
            http.should_exit = http.force_exit = True
            await self._close(llm, serving)
            if beside is not None:
                beside.cancel()
        return EXIT_FORCED if self._force.is_set() else code

    async def _load(self) -> AsyncLLM | None:
        """The loaded engine, None when a signal came first. Meanwhile requests are answered with 503."""
        loading = asyncio.create_task(self._load_llm())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return None
            llm = loading.result()
        finally:
            stopping.cancel()
            if not loading.done():
                loading.cancel()
                await asyncio.wait((loading,), timeout=CLOSE_S)
        self.state.attach(llm)
        quiet_gc(SMALL_HEAP_THRESHOLDS)
        self._announce(llm)
        return llm

    def _announce(self, llm: AsyncLLM) -> None:
        if self._on_ready is not None:
            self._on_ready()
            return
        host, port = self.listener.getsockname()[:2]
        warn_if_open(self.server, host)
        print(f"Quire serves {llm.model_name} at {address_of(self.server, host, port)} (Ctrl-C stops)", flush=True)

    async def _watch(self, llm: AsyncLLM) -> int:
        """Wait for a signal or the engine's end."""
        while not self._stop.is_set():
            failure = llm.failure()
            if failure is not None or self.state.engine_lost.is_set():
                logger.error("the engine is lost: %s", failure)
                return EXIT_FAILED
            await self.state.metrics.publish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._stop.wait()
        return EXIT_OK

    async def _drain(self) -> None:
        """Refuse new work; let the running finish within the limit, then cut it off with an error event."""
        self.state.draining = True
        limit_s = self.server.shutdown_timeout
        deadline_s = asyncio.get_running_loop().time() + limit_s
        was_open = bool(self.state.live)
        if was_open and limit_s:
            within = f"for at most {limit_s:g} s (--shutdown-timeout)"
            print(f"Finishing {_requests(self.state)} {within}; a second Ctrl-C cuts them off.", flush=True)
        while self.state.live and not self._force.is_set() and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.05)
        if self.state.live and not self._force.is_set():
            n_cut = _requests(self.state)
            verb = "is" if len(self.state.live) == 1 else "are"
            logger.warning("%g s are over (--shutdown-timeout): %s %s cut off", limit_s, n_cut, verb)
        self._announce_end(was_open)
        for exchange_task in list(self.state.live):
            exchange_task.stop(unavailable("draining", "The server is shutting down."))
        for _ in range(10):
            if not self.state.live:
                break
            await asyncio.sleep(0.05)

    def _announce_end(self, was_open: bool) -> None:
        """was_open: there were requests to finish. Of several API processes their parent speaks."""
        if self._on_ready is None:
            left = f"{_requests(self.state)} cut off" if self.state.live else "no request is open"
            print(f"Quire shuts down: {left}{' any more' if was_open and not self.state.live else ''}.", flush=True)

    async def _close(self, llm: AsyncLLM | None, serving: asyncio.Task[None] | None) -> None:
        self.state.close()
        if llm is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S + 1):
                    await llm.shutdown()
        if serving is not None:
            await asyncio.wait((serving,), timeout=CLOSE_S)

    def stop(self) -> None:
        """Refuse new work and leave when the rest is done (idempotent)."""
        self._stop.set()

    def force(self) -> None:
        """Cut the drain short."""
        self._stop.set()
        self._force.set()

    def reload(self) -> None:
        """Read the API keys again, and open the record again, whose file may have been moved away."""
        logger.info("SIGHUP: the files of this process are read and opened again")
        self.state.keys.reload()
        self.state.recorder.reopen()
        if self._on_reload is not None:
            self._on_reload()

    def _on_signal(self, number: int) -> None:
        self._first_signal = self._first_signal or number
        # One process of several is left to its parent, which gets the same signal when all processes do.
        if self._stop.is_set() and self._on_ready is None:
            self._force.set()
        self._stop.set()


def _requests(state: ServerState) -> str:
    return f"{len(state.live)} request{'s' * (len(state.live) != 1)}"


def fail(error: QuireError, code: int) -> int:
    """The message on stderr, and the code back."""
    say(error)
    return code


def say(error: QuireError) -> None:
    """The message on stderr; a table takes several lines."""
    print(complaint(in_flags(error, EngineConfig, ServerConfig)), file=sys.stderr, flush=True)
