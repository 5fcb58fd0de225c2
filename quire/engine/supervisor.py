"""The life of the engine process: start, watch, dump the stacks of one that stands still, end it, start the next one.

Owns the process, its socket's folder, the memory of its flight recorder, and what is known of how engines ended. Does
not own requests: each client learns from its own link that the engine is gone, and from the next engine how it ended.
Invariants: the engine never outlives this process; at most `max_engine_restarts` restarts in `RESTART_WINDOW_S`, those
that fail counted; a process that somebody has stopped (SIGSTOP) is not taken for a hung one.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import signal
import time

import msgspec

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineError
from quire.core.events import EndKind, EngineEnd, EngineFailed, EngineReady, Fetching, Heartbeat
from quire.core.shortage import shortage
from quire.engine.child import Child, status_text
from quire.engine.flight_recorder import make_memory, read_memory
from quire.engine.progress import makes_progress
from quire.engine.wire import SHUTDOWN_LINE, SOCKET, ProcessStart, decode_status, socket_folder

logger = logging.getLogger("quire.engine")

ENGINE_COMMAND = ("-m", "quire.engine.process")
RESTART_WINDOW_S = 600.0
MAX_ENDS = 16
"""Ends of engines that the next one passes on."""
WATCH_S = 0.2
GRACE_S = 3.0
"""A process that makes no progress has this long after its stacks were dumped before it is killed."""
MAX_SLEEP_S = 1.0
"""When the watch itself slept longer, this process was stopped or starved, and the engine's silence means nothing."""
LEAVE_S = 3.0
ENDS_S = 15.0
"""A process that has said how it ends has this long for it: it ends ranks, with their stacks, one after the other."""
HELD_S = 30.0
"""And when it was killed it is waited for: what it holds of a device is not to be had before. A driver may keep it so
long, in calls that nothing ends, where another process that it shared memory with was killed."""
RETRY_S = 1.0
"""Wait after a start that failed."""
CRASHES = {
    -number
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP,
                   signal.SIGSYS)
}  # fmt: skip
"""Exit statuses by signals that faulty code causes."""


class EngineSupervisor:
    """See the module. `start`, then `watch` as a task, at last `shutdown`."""

    def __init__(self, config: EngineConfig, command: tuple[str, ...] = ENGINE_COMMAND) -> None:
        """Raises ConfigError if there is no folder for the socket."""
        self._config = config
        self._command = command
        self._folder = socket_folder()
        self.folder = self._folder.path
        self.address = f"ipc://{self.folder / SOCKET}"
        self.failure: str | None = None
        """Why there is no engine and none will come; None while one lives or is being started."""
        self.n_restarts = 0
        self.ended = asyncio.Event()
        """Set with `failure`."""
        self._child: Child | None = None
        self._recorder_fd = -1
        self._ready: asyncio.Future[EngineReady] | None = None
        self._late = asyncio.Event()
        """The process has not loaded the model in time."""
        self._load_timer: asyncio.TimerHandle | None = None
        """Sets `_late`; None while nothing is loaded, or is being fetched from the hub."""
        self._has_failed = asyncio.Event()
        """The process has said that it ends."""
        self._said: str | None = None
        """Why the process ends, in its own words or in those of who ends it."""
        self._end_kind: EndKind | None = None
        """Of the process that is ending; None: its exit status says it."""
        self._ends: collections.deque[tuple[float, EngineEnd]] = collections.deque(maxlen=MAX_ENDS)
        self._beat = Heartbeat(0.0, 0)
        self._restarts_s: collections.deque[float] = collections.deque()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The engine process, if there is one."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> EngineReady:
        """Start the first engine. Raises ConfigError with its reason if it cannot load, EngineError where that was a
        fault of the moment, such as a killed process: the next start may succeed."""
        try:
            ready = await self._start()
        except EngineError as error:
            if self._end_kind is EndKind.REFUSED:
                raise ConfigError(error.message) from None
            raise
        self._watcher = asyncio.create_task(self._watch(ready.device), name="quire-supervisor")
        return ready

    async def verdict(self) -> str | None:
        """To be asked when a link was lost: `failure` once it is known whether another engine is started."""
        child = self._child
        if child is None:
            return self.failure
        waiting = [asyncio.ensure_future(child.gone.wait()), asyncio.ensure_future(self.ended.wait())]
        await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        for _ in range(20):
            if self.failure is not None or self._child is not child:
                break
            await asyncio.sleep(0.02)
        return self.failure

    async def shutdown(self) -> None:
        """Ask the process to leave, then make it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._child is not None:
            self._child.say(SHUTDOWN_LINE)
            await self._child.wait(LEAVE_S)
        await self.close()

    async def close(self) -> None:
        """End the process and free everything now (idempotent)."""
        try:
            if self._child is not None:
                await self._child.end()
        finally:
            self._close_recorder()
            self._folder.remove()

    async def _start(self) -> EngineReady:
        """Start a process and wait until it is loaded. Raises EngineError with its reason if it ends before."""
        self._said = self._end_kind = None
        self._ready = asyncio.get_running_loop().create_future()
        self._close_recorder()
        try:
            self._recorder_fd = make_memory()
        except OSError as error:
            place = OSError(error.errno, error.strerror, "memory shared with the engine")
            raise EngineError(str(shortage(place))) from None
        self._child = child = Child(self._command, self._first_line, self._hear, inherited=(self._recorder_fd,))
        self._has_failed.clear()
        gone, late, failed = (
            asyncio.ensure_future(one.wait()) for one in (child.gone, self._late, self._has_failed)
        )  # fmt: skip
        self._limit_load(True)
        try:
            await asyncio.wait((self._ready, gone, late, failed), return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return self._ready.result()
            if self._said is not None:
                await self._see_off(child)
            elif not gone.done():
                await child.abort()
                self._end_kind = EndKind.REFUSED  # by an option, `load_timeout`
                self._said = (
                    f"the model was not loaded within load_timeout = {self._config.load_timeout:g} s, downloads from "
                    "the hub not counted; the stacks in the log say what it waits for: mostly a disk or network file "
                    "system that does not answer. Mend it, or allow more"
                )
        finally:
            self._limit_load(False)
            for waiting in (gone, late, failed):
                waiting.cancel()
        raise EngineError(await self._end_reason(child))

    def _first_line(self, status_fd: int) -> bytes:
        now_s = time.monotonic()
        while self._ends and now_s - self._ends[0][0] > RESTART_WINDOW_S:
            self._ends.popleft()
        start = ProcessStart(
            self.address, status_fd, self._config, self._recorder_fd, self.n_restarts,
            self._config.max_engine_restarts - len(self._restarts_s), [end for _, end in self._ends],
        )  # fmt: skip
        return msgspec.json.encode(start) + b"\n"

    def _limit_load(self, is_on: bool) -> None:
        """Start the clock of `load_timeout` from 0, or stop it."""
        if self._load_timer is not None:
            self._load_timer.cancel()
        self._late.clear()
        limit_s = self._config.load_timeout if is_on else 0
        self._load_timer = asyncio.get_running_loop().call_later(limit_s, self._late.set) if limit_s else None

    def _hear(self, line: bytes) -> None:
        status = decode_status(line)
        match status:
            case Heartbeat():
                self._beat = status
            case EngineFailed(message, kind):
                self._said, self._end_kind = message, kind
                self._has_failed.set()
            case Fetching(is_over):
                self._limit_load(is_over)
            case EngineReady() if self._ready is not None and not self._ready.done():
                self._beat = Heartbeat(0.0, 0)
                self._ready.set_result(status)

    async def _end_reason(self, child: Child) -> str:
        """Why the process ended, which is also kept for the next one; frees what is left of it."""
        await child.wait(1.0)
        code = await child.end()
        kind = self._end_kind
        if kind is None:
            kind = EndKind.CRASH if code in CRASHES or (code or 0) > 0 else EndKind.KILLED
        working = read_memory(self._recorder_fd)
        self._close_recorder()
        self._ends.append((time.monotonic(), EngineEnd(self.n_restarts, kind, working)))
        status = status_text(code) if code is not None else "SIGKILL, of which it does not end"
        return self._said or f"the engine process ended with {status}"

    def _close_recorder(self) -> None:
        if self._recorder_fd >= 0:
            os.close(self._recorder_fd)
            self._recorder_fd = -1

    async def _watch(self, device: str) -> None:
        """Until there is no engine any more: wait for the end of this one, start the next one."""
        reason = ""
        while True:
            if not reason and self._child is not None:
                await self._watch_one(self._child, device)
                reason = await self._end_reason(self._child)
            now_s = time.monotonic()
            while self._restarts_s and now_s - self._restarts_s[0] > RESTART_WINDOW_S:
                self._restarts_s.popleft()
            if len(self._restarts_s) >= self._config.max_engine_restarts:
                limit = self._config.max_engine_restarts
                again = f"; it was started again {limit} times in ten minutes, the most allowed" if limit else ""
                self._fail(reason + again)
                return
            self._restarts_s.append(now_s)
            self.n_restarts += 1
            logger.error("%s; starting the engine again (%d)", reason, self.n_restarts)
            try:
                await self._start()
                logger.info("the engine serves again after %.1f s", time.monotonic() - now_s)
                reason = ""
            except EngineError as error:
                reason = f"the engine could not be started again: {error.message}"
                await asyncio.sleep(RETRY_S)

    async def _see_off(self, child: Child) -> None:
        """Returns when a process that has said how it ends is gone, or is not waited for any longer."""
        if await child.wait(LEAVE_S) is not None:
            return
        logger.error("%s; the engine process, number %d, has not ended yet", self._said, child.pid)
        if await child.wait(ENDS_S - LEAVE_S) is None:
            logger.error("the engine process, number %d, does not end: it is killed", child.pid)
            child.signal(signal.SIGKILL)
            await child.wait(HELD_S)

    def _fail(self, reason: str) -> None:
        logger.error("the engine is lost: %s", reason)
        self.failure = reason
        self.ended.set()

    async def _watch_one(self, child: Child, device: str) -> None:
        """Returns when the process is gone, or was killed because it made no progress."""
        bad_s, last_s, is_dumped = 0.0, time.monotonic(), False
        while not child.gone.is_set():
            try:
                async with asyncio.timeout(WATCH_S):
                    await child.gone.wait()
            except TimeoutError:
                pass
            if self._said is not None and not child.gone.is_set():
                await self._see_off(child)
                return
            now_s = time.monotonic()
            slept_s, last_s = now_s - last_s, now_s
            beat = self._beat
            limit_s = self._config.engine_stall_timeout
            good = makes_progress(device, now_s - child.heard_s, beat.last_step_age_s, beat.steps_in_flight, limit_s)
            if good or slept_s > MAX_SLEEP_S or child.is_stopped():
                bad_s, is_dumped = 0.0, False
                continue
            bad_s += slept_s
            if not is_dumped:
                logger.error("the engine makes no progress; the stacks of its threads follow")
                child.show_stacks()
                is_dumped = True
            if bad_s > GRACE_S:
                self._said, self._end_kind = "the engine made no progress and was ended", EndKind.STALL
                await child.abort()
                return
