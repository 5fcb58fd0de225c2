"""The life of the engine process: start, watch, dump the stacks of one that stands still, end it, start the next one.

Owns the process, its socket's folder and its status pipe. Does not own requests: each client learns from its own link
that the engine is gone. Invariants: the engine never outlives this process; at most `max_engine_restarts` restarts in
`RESTART_WINDOW_S`; a process that somebody has stopped (SIGSTOP) is not taken for a hung one.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import msgspec

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineError
from quire.core.events import EngineFailed, EngineReady, Fetching, Heartbeat
from quire.engine.progress import makes_progress
from quire.engine.wire import SHUTDOWN_LINE, ProcessStart, decode_status, socket_folder

logger = logging.getLogger("quire.engine")

ENGINE_COMMAND = ("-m", "quire.engine.process")
RESTART_WINDOW_S = 600.0
WATCH_S = 0.2
GRACE_S = 3.0
"""A process that makes no progress has this long after its stacks were dumped before it is killed."""
MAX_SLEEP_S = 1.0
"""When the watch itself slept longer, this process was stopped or starved, and the engine's silence means nothing."""
LEAVE_S = 3.0
DUMP_S = 0.5
"""For writing the stacks of a process that is going to be killed."""
KILLED_S = 5.0
"""Longest wait for a killed process: one whose file system is gone may stay in the kernel for good."""


def status_text(code: int) -> str:
    """An exit status as people read it."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name
    return f"{name}{', which the system sends when memory runs out' if -code == signal.SIGKILL else ''}"


class EngineSupervisor:
    """See the module. `start`, then `watch` as a task, at last `shutdown`."""

    def __init__(self, config: EngineConfig, command: tuple[str, ...] = ENGINE_COMMAND) -> None:
        self._config = config
        self._command = command
        self.folder = socket_folder()
        self.address = f"ipc://{self.folder}/engine"
        self.failure: str | None = None
        """Why there is no engine and none will come; None while one lives or is being started."""
        self.n_restarts = 0
        self.ended = asyncio.Event()
        """Set with `failure`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._status_fd = -1
        self._unread = b""
        self._ready: asyncio.Future[EngineReady] | None = None
        self._gone = asyncio.Event()
        """The status pipe has ended: the process is gone or about to be."""
        self._late = asyncio.Event()
        """The process has not loaded the model in time."""
        self._load_timer: asyncio.TimerHandle | None = None
        """Sets `_late`; None while nothing is loaded, or is being fetched from the hub."""
        self._said: str | None = None
        self._beat = Heartbeat(0.0, 0)
        self._beat_s = 0.0
        self._restarts_s: collections.deque[float] = collections.deque()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The engine process, if there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> EngineReady:
        """Start the first engine. Raises ConfigError with its reason if it cannot load."""
        try:
            ready = await self._start()
        except EngineError as error:
            raise ConfigError(error.message) from None
        self._watcher = asyncio.create_task(self._watch(ready.device), name="quire-supervisor")
        return ready

    async def verdict(self) -> str | None:
        """To be asked when a link was lost: `failure` once it is known whether another engine is started."""
        await asyncio.wait(
            (asyncio.ensure_future(self._gone.wait()), asyncio.ensure_future(self.ended.wait())),
            timeout=1.0,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for _ in range(20):
            if self.failure is not None or not self._gone.is_set():
                break
            await asyncio.sleep(0.02)
        return self.failure

    async def shutdown(self) -> None:
        """Ask the process to leave, then make it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        process = self._process
        if process is not None and process.poll() is None and process.stdin is not None:
            try:
                process.stdin.write(SHUTDOWN_LINE)
                process.stdin.flush()
            except OSError:
                process.kill()
            for _ in range(int(LEAVE_S / 0.05)):
                if process.poll() is not None:
                    break
                await asyncio.sleep(0.05)
        await self.close()

    async def close(self) -> None:
        """End the process and free everything now (idempotent)."""
        try:
            await self._end_process()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _start(self) -> EngineReady:
        """Start a process and wait until it is loaded. Raises EngineError with its reason if it ends before."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        # A session of its own: Ctrl-C in a terminal reaches only this process, which decides what it means.
        self._process = subprocess.Popen(
            [sys.executable, *self._command], stdin=subprocess.PIPE, pass_fds=(writing,), start_new_session=True
        )
        os.close(writing)
        self._status_fd, self._unread, self._said = reading, b"", None
        self._gone.clear()
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(reading, self._read_status)
        stdin = self._process.stdin
        if stdin is None:
            raise EngineError("the engine process has no standard input")
        try:
            stdin.write(msgspec.json.encode(ProcessStart(self.address, writing, self._config)) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self._gone.set()
        gone, late = asyncio.ensure_future(self._gone.wait()), asyncio.ensure_future(self._late.wait())
        self._limit_load(True)
        try:
            await asyncio.wait((self._ready, gone, late), return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return self._ready.result()
            if not gone.done():
                self._signal(signal.SIGUSR1)
                await asyncio.wait((gone,), timeout=DUMP_S)
                self._said = (
                    f"the model was not loaded within load_timeout = {self._config.load_timeout:g} s, downloads from "
                    "the hub not counted; the stacks in the log say what it waits for: mostly a disk or network file "
                    "system that does not answer. Mend it, or allow more"
                )
        finally:
            self._limit_load(False)
            gone.cancel()
            late.cancel()
        raise EngineError(await self._epitaph())

    def _limit_load(self, is_on: bool) -> None:
        """Start the clock of `load_timeout` from 0, or stop it."""
        if self._load_timer is not None:
            self._load_timer.cancel()
        self._late.clear()
        limit_s = self._config.load_timeout if is_on else 0
        self._load_timer = asyncio.get_running_loop().call_later(limit_s, self._late.set) if limit_s else None

    def _read_status(self) -> None:
        try:
            data = os.read(self._status_fd, 65536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._status_fd)
            self._gone.set()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        self._beat_s = time.monotonic()
        for line in lines:
            status = decode_status(line)
            match status:
                case Heartbeat():
                    self._beat = status
                case EngineFailed(message):
                    self._said = message
                case Fetching(is_over):
                    self._limit_load(is_over)
                case EngineReady() if self._ready is not None and not self._ready.done():
                    self._beat = Heartbeat(0.0, 0)
                    self._ready.set_result(status)

    async def _epitaph(self) -> str:
        """Why the process ended; frees what is left of it."""
        process = self._process
        if process is None:
            return "there is no engine process"
        for _ in range(50):
            if process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        await self._end_process()
        return self._said or f"the engine process ended with {status_text(process.returncode or 0)}"

    async def _end_process(self) -> None:
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.kill()
            for _ in range(int(KILLED_S / 0.02)):
                if process.poll() is not None:
                    break
                await asyncio.sleep(0.02)
            else:
                logger.error("the engine process %d was killed and does not end", process.pid)
            if process.stdin is not None:
                process.stdin.close()
        if self._status_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = -1
        self._gone.set()

    async def _watch(self, device: str) -> None:
        """Until there is no engine any more: wait for the end of this one, start the next one."""
        while True:
            await self._watch_one(device)
            reason = await self._epitaph()
            now_s = time.monotonic()
            while self._restarts_s and now_s - self._restarts_s[0] > RESTART_WINDOW_S:
                self._restarts_s.popleft()
            if len(self._restarts_s) >= self._config.max_engine_restarts:
                self._fail(reason)
                return
            self._restarts_s.append(now_s)
            self.n_restarts += 1
            logger.error("%s; starting it again (%d)", reason, self.n_restarts)
            try:
                await self._start()
            except EngineError as error:
                self._fail(f"{reason}, and could not be started again: {error.message}")
                return

    def _fail(self, reason: str) -> None:
        logger.error("the engine is lost: %s", reason)
        self.failure = reason
        self.ended.set()

    async def _watch_one(self, device: str) -> None:
        """Returns when the process is gone, or was killed because it made no progress."""
        bad_s, last_s, is_dumped = 0.0, time.monotonic(), False
        while not self._gone.is_set():
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._gone.wait()
            except TimeoutError:
                pass
            now_s = time.monotonic()
            slept_s, last_s = now_s - last_s, now_s
            beat = self._beat
            limit_s = self._config.engine_stall_timeout
            good = makes_progress(device, now_s - self._beat_s, beat.last_step_age_s, beat.steps_in_flight, limit_s)
            if good or slept_s > MAX_SLEEP_S or self._is_stopped():
                bad_s, is_dumped = 0.0, False
                continue
            bad_s += slept_s
            if not is_dumped:
                logger.error("the engine makes no progress; the stacks of its threads follow")
                self._signal(signal.SIGUSR1)
                is_dumped = True
            if bad_s > GRACE_S:
                self._said = "the engine made no progress and was ended"
                self._signal(signal.SIGKILL)
                return

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _is_stopped(self) -> bool:
        """True if somebody has stopped the process with a signal, as a debugger does."""
        try:
            stat = pathlib.Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"
