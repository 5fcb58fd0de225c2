"""Several API processes on one port, and the one engine that they share.

Owns the processes: starts them, replaces one that died, hangs or was stopped, ends them. Does not serve itself.
Invariants: children never outlive this process (they leave at the end of their standard input); one that dies ends only
its own requests, and the server goes on while one can serve; time in which this process itself was stopped or the
machine slept counts against nobody; the port is checked before anything is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineError, QuireError, complaint
from quire.engine.child import Child, status_text
from quire.engine.supervisor import EngineSupervisor
from quire.serve.config import ServerConfig
from quire.serve.signals import on_signals

logger = logging.getLogger("quire.serve")

WATCH_S = 0.1
LEAVE_S = 5.0
MAX_SLEEP_S = 1.0
"""When the watch itself slept longer, this process was stopped or starved, and the silence of others means nothing."""
BEAT_S = 1.0
"""An API process reports so often, or four times in the time after which it counts as hung, if that is less."""
QUICK_S = 30.0
"""An API process that ends sooner after its start is started again later each time."""
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
"""The wait before the second start in a row, from which it doubles, and the longest."""
MAX_FRUITLESS = 5
"""When each API process has ended so many times in a row without having served, the server ends."""
READY, BEAT = b"ready", b"beat"
"""What an API process reports: it serves; its event loop runs."""
REFUSED = b"refused "
"""It also reports, with a text in JSON: why it cannot use the model or an option."""
DRAIN, FORCE = b"drain", b"force"
"""What it is told: refuse new work and leave when the rest is done; leave now."""
EXIT_OK, EXIT_FAILED, EXIT_BAD_OPTIONS, EXIT_FORCED = 0, 1, 2, 130
STANDS_ABOVE = "no API process can serve with these options: the reason stands above"


class ApiProcessStart(msgspec.Struct):
    """First line on an API process's standard input, as JSON."""

    engine: EngineConfig
    server: ServerConfig
    address: str
    """Of the engine's socket."""
    index: int
    folder: str
    """Where the API processes leave their metrics for each other."""
    status_fd: int = -1
    """Where it reports."""
    others_serve: bool = False
    """It takes the place of one of several: it may listen only once it can serve."""


class ApiProcess:
    """One API process after the other in the same place."""

    def __init__(
        self,
        start: ApiProcessStart,
        on_ready: Callable[[], None],
        on_refused: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        """on_ready: called when a process serves; on_refused: with the reason why one cannot; on_end: when one has
        ended, before the next is started."""
        self._start = start
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._on_end = on_end
        self._child: Child | None = None
        self._heard = False
        """The process has reported."""
        self._n_quick = 0
        """Ends in a row, each within `QUICK_S` of the start."""
        self.is_serving = False
        self._has_served = False
        """This process or one before it."""
        self.n_fruitless = 0
        """Ends in a row of processes that had not served."""
        self.last_code: int | None = None
        self.last_end = ""
        """Why the last process ended, in words."""

    async def run(self) -> None:
        """For ever: start a process, wait for its end, say why, wait a little."""
        while True:
            began_s = time.monotonic()
            self.is_serving = self._heard = False
            try:
                self.last_end = await self._live()
            except EngineError as error:
                self.last_code, self.last_end = None, error.message
            self.n_fruitless = 0 if self.is_serving else self.n_fruitless + 1
            self.is_serving = False
            self._n_quick = self._n_quick + 1 if time.monotonic() - began_s < QUICK_S else 0
            wait_s = 0.0 if self._n_quick < 2 else min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(self._n_quick - 2, 16))
            when = f"in {wait_s:g} s" if wait_s else "now"
            logger.error("API process %d %s; starting it again %s", self._start.index, self.last_end, when)
            self._on_end()
            await asyncio.sleep(wait_s)

    def say(self, line: bytes) -> None:
        """One of `DRAIN` and `FORCE`."""
        if self._child is not None:
            self._child.say(line + b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it lives."""
        if self._child is not None:
            self._child.signal(number)

    @property
    def is_gone(self) -> bool:
        return self._child is None or self._child.code is not None

    async def close(self) -> None:
        """End it now."""
        if self._child is not None:
            await self._child.end()

    async def _live(self) -> str:
        """One process from its start to its end; returns why it ended. EngineError if it cannot be started."""
        self._child = child = Child(("-m", "quire.serve.api_process"), self._first_line, self._hear)
        reason = await self._watch(child)
        await child.wait(LEAVE_S if reason is None else 0.0)
        self.last_code = await child.end()
        status = "no status" if self.last_code is None else status_text(self.last_code)
        return f"(pid {child.pid}) {reason or f'ended with {status}'}"

    def _first_line(self, status_fd: int) -> bytes:
        start = msgspec.structs.replace(self._start, status_fd=status_fd, others_serve=self._has_served)
        return msgspec.json.encode(start) + b"\n"

    def _hear(self, line: bytes) -> None:
        self._heard = True
        if line.startswith(REFUSED):
            self._on_refused(msgspec.json.decode(line.removeprefix(REFUSED), type=str))
        if line == READY and not self.is_serving:
            self.is_serving = self._has_served = True
            self._on_ready()

    async def _watch(self, child: Child) -> str | None:
        """Until it is gone, or does not report for too long, as one that hangs or that somebody has stopped: why it has
        to be replaced then. Connections wait in its queue meanwhile, which no other API process can take from it."""
        silent_s, last_s, heard_s = 0.0, time.monotonic(), child.heard_s
        while not child.gone.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await child.gone.wait()
            slept_s, last_s = time.monotonic() - last_s, time.monotonic()
            is_new, heard_s = child.heard_s > heard_s, child.heard_s
            silent_s = 0.0 if is_new or slept_s > MAX_SLEEP_S else silent_s + slept_s
            limit_s = self._start.server.api_stall_timeout
            if limit_s and not self._heard:  # it imports its libraries
                limit_s = self._start.engine.load_timeout
            if not limit_s or silent_s < limit_s:
                continue
            if child.is_stopped():
                return f"was stopped by a signal and gave no sign of life for {limit_s:g} s: it is ended"
            logger.error(
                "API process %d (pid %d) gives no sign of life; the stacks of its threads follow",
                self._start.index,
                child.pid,
            )
            await child.abort()
            return f"gave no sign of life for {limit_s:g} s: it is ended"
        return None


def code_before_serving(first_signal: int) -> int:
    """Of a server that a signal ends before it serves: as of any command that is interrupted. 0: it was no signal."""
    return EXIT_FORCED if first_signal == signal.SIGINT else EXIT_OK


class ApiProcesses:
    """The main process of a server with several API processes."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, engine_command: tuple[str, ...]) -> None:
        self._engine_command = engine_command
        self._engine = engine
        self._server = server
        self._first_signal = 0
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._serves = asyncio.Event()
        """An API process has served."""
        self._changed = asyncio.Event()
        """An API process has ended."""
        self._processes: list[ApiProcess] = []
        self._told: set[str] = set()
        """Reasons of refusals that were printed: all have the same model and options, and one message is enough."""

    async def run(self, announce: str) -> int:
        """Serve until a signal; returns the exit code. QuireError if the engine does not load, or nobody can serve.

        announce: what to print once requests are served.
        """
        on_signals(self._on_stop, self._on_reload)
        supervisor = EngineSupervisor(self._engine, self._engine_command)
        tasks: list[asyncio.Task[None]] = []
        try:
            for index in range(self._server.api_processes):
                start = ApiProcessStart(self._engine, self._server, supervisor.address, index, str(supervisor.folder))
                self._processes.append(ApiProcess(start, self._on_ready, self._on_refused, self._changed.set))
                tasks.append(asyncio.create_task(self._processes[-1].run(), name=f"quire-api-process-{index}"))
            code = await self._serve(supervisor, announce)
            for task in tasks:
                task.cancel()
            await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*[process.close() for process in self._processes])
            await supervisor.shutdown()
        return EXIT_FORCED if self._force.is_set() else code

    def _on_ready(self) -> None:
        self._told.clear()
        self._serves.set()

    def _on_refused(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            print(complaint(ConfigError(reason)), file=sys.stderr, flush=True)

    async def _serve(self, supervisor: EngineSupervisor, announce: str) -> int:
        """Until a signal, or until there is nobody left to serve."""
        loading = asyncio.create_task(supervisor.start())
        announcing = asyncio.create_task(self._announce(loading, announce))
        waiting = [asyncio.create_task(event.wait()) for event in (self._stop, supervisor.ended)]
        try:
            while not self._stop.is_set():
                changed = asyncio.create_task(self._changed.wait())
                watched: set[asyncio.Task[object]] = {changed, *waiting}
                if not loading.done():
                    watched.add(loading)
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
                if loading.done():
                    self._check_loaded(loading)
                if supervisor.failure is not None:
                    return EXIT_FAILED
                self._check_processes()
        finally:
            for task in (announcing, loading, *waiting):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, QuireError):
                await loading
        print("Quire shuts down.", flush=True)
        return EXIT_OK if self._serves.is_set() else code_before_serving(self._first_signal)

    async def _announce(self, loading: asyncio.Task[object], text: str) -> None:
        await asyncio.wait((loading,))
        await self._serves.wait()
        print(text, flush=True)

    def _check_loaded(self, loading: asyncio.Task[object]) -> None:
        """Raise what loading the engine raised, but for a reason that an API process has given already."""
        try:
            loading.result()
        except ConfigError as error:
            raise ConfigError(STANDS_ABOVE) if error.message in self._told else error from None

    def _check_processes(self) -> None:
        """Raise an error when no API process can serve: all fail at their options, or each has ended too often."""
        if any(process.is_serving or not process.n_fruitless for process in self._processes):
            return
        last = self._processes[-1].last_end
        if all(process.last_code == EXIT_BAD_OPTIONS for process in self._processes):
            raise ConfigError(STANDS_ABOVE)
        if all(process.n_fruitless >= MAX_FRUITLESS for process in self._processes):
            raise EngineError(
                f"no API process can serve: each has ended {MAX_FRUITLESS} times or more without having served; the "
                f"last {last}"
            )

    async def _drain(self) -> None:
        """Each API process refuses new work and finishes its own; a second signal cuts that short."""
        for process in self._processes:
            process.say(DRAIN)
        deadline_s = time.monotonic() + self._server.shutdown_timeout + LEAVE_S
        is_forced = False
        while not all(process.is_gone for process in self._processes) and time.monotonic() < deadline_s:
            if self._force.is_set() and not is_forced:
                is_forced, deadline_s = True, time.monotonic() + LEAVE_S
                for process in self._processes:
                    process.say(FORCE)
            await asyncio.sleep(WATCH_S / 2)

    def _on_stop(self, number: int) -> None:
        self._first_signal = self._first_signal or number
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    def _on_reload(self) -> None:
        logger.info("SIGHUP: the API processes read their files again")
        for process in self._processes:
            process.signal(signal.SIGHUP)
