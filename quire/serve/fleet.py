"""Several API processes on one port, and the one engine that they share.

Owns the processes: starts them, starts one that died again, ends them. Does not serve itself.
Invariants: children never outlive this process (they leave at the end of their standard input); a worker that dies ends
only its own requests; the port is checked before anything is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import time

import msgspec

from quire.config.engine import EngineConfig
from quire.core.errors import QuireError
from quire.engine.supervisor import EngineSupervisor
from quire.serve.config import ServerConfig

logger = logging.getLogger("quire.serve")

WATCH_S = 0.1
LEAVE_S = 5.0
MAX_QUICK_ENDS = 5
"""Ends in a row, each within `QUICK_S` of the start, after which a worker is given up and the server with it."""
QUICK_S = 10.0
EXIT_OK, EXIT_FAILED, EXIT_BAD_OPTIONS, EXIT_FORCED = 0, 1, 2, 130


class WorkerStart(msgspec.Struct):
    """First line on a worker's standard input, as JSON."""

    engine: EngineConfig
    server: ServerConfig
    address: str
    """Of the engine's socket."""
    index: int
    folder: str
    """Where the workers leave their metrics for each other."""


class Worker:
    """One API process."""

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        self.n_quick_ends = 0
        self.began_s = 0.0
        self.process: subprocess.Popen[bytes]
        self.begin()

    def begin(self) -> None:
        """Start the process."""
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire.serve.worker"], stdin=subprocess.PIPE, start_new_session=True
        )
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(msgspec.json.encode(self._start) + b"\n")
                self.process.stdin.flush()

    def again(self, code: int) -> bool:
        """Start another in the place of one that ended; False if that is hopeless."""
        self.n_quick_ends = self.n_quick_ends + 1 if time.monotonic() - self.began_s < QUICK_S else 0
        if code == EXIT_BAD_OPTIONS or self.n_quick_ends >= MAX_QUICK_ENDS:
            return False
        logger.error("API process %d ended with status %d; starting it again", self._start.index, code)
        self.close()
        self.begin()
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it lives."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def close(self) -> None:
        """End it now. One whose file system is gone may stay in the kernel for good: that is not waited for."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


class Fleet:
    """The main process of a server with several API processes."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, engine_command: tuple[str, ...]) -> None:
        self._engine_command = engine_command
        self._engine = engine
        self._server = server
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._workers: list[Worker] = []

    async def run(self, announce: str) -> int:
        """Serve until a signal; returns the exit code. QuireError if the engine does not load.

        announce: what to print once requests are served.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        supervisor = EngineSupervisor(self._engine, self._engine_command)
        try:
            for index in range(self._server.api_processes):
                start = WorkerStart(self._engine, self._server, supervisor.address, index, str(supervisor.folder))
                self._workers.append(Worker(start))
            code = await self._serve(supervisor, announce)
            await self._drain()
        finally:
            for worker in self._workers:
                worker.close()
            await supervisor.shutdown()
        return EXIT_FORCED if self._force.is_set() else code

    async def _serve(self, supervisor: EngineSupervisor, announce: str) -> int:
        loading = asyncio.create_task(supervisor.start())
        is_said = False
        try:
            while not self._stop.is_set():
                if loading.done() and not is_said:
                    loading.result()
                    is_said = True
                    with contextlib.suppress(OSError):
                        print(announce, flush=True)
                if supervisor.failure is not None:
                    return EXIT_FAILED
                for worker in self._workers:
                    code = worker.process.poll()
                    if code is not None and not worker.again(code):
                        return code if code > 0 else EXIT_FAILED
                await asyncio.sleep(WATCH_S)
        finally:
            if not loading.done():
                loading.cancel()
            with contextlib.suppress(asyncio.CancelledError, QuireError):
                await loading
        return EXIT_OK

    async def _drain(self) -> None:
        """Each worker refuses new work and finishes its own; a second signal cuts that short."""
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + self._server.shutdown_timeout + LEAVE_S
        is_forced = False
        while any(worker.process.poll() is None for worker in self._workers) and time.monotonic() < deadline_s:
            if self._force.is_set() and not is_forced:
                is_forced, deadline_s = True, time.monotonic() + LEAVE_S
                for worker in self._workers:
                    worker.signal(signal.SIGTERM)
            await asyncio.sleep(WATCH_S / 2)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._force.set()
        self._stop.set()
