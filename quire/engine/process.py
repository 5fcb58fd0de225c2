"""The engine process: reads commands from its clients, steps while there is work, sends one message a step to each.

Run as `python -m quire.engine.process` by `engine/supervisor.py`. Ends when told to, or when its parent is gone
(end of file on standard input), or with EngineFailed and exit status 1 when steps keep failing. SIGUSR1 writes the
stacks of all threads to the log. Owns no policy.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from quire.compute.weights.hub import find_checkpoint, is_on_hub
from quire.config.engine import EngineConfig
from quire.core import env
from quire.core.errors import QuireError
from quire.core.events import (
    Cancel,
    Command,
    EngineFailed,
    EngineReady,
    Explain,
    Fetching,
    Heartbeat,
    SeqDelta,
    Shutdown,
    Status,
    StepOutputs,
    Submit,
)
from quire.engine.build import build_engine
from quire.engine.commands import refusals
from quire.engine.core import EngineCore
from quire.engine.garbage import quiet_gc
from quire.engine.port import Port
from quire.engine.throughput import ThroughputLog
from quire.engine.wire import SHUTDOWN_LINE, ProcessStart, encode, encode_status

logger = logging.getLogger("quire.engine")

STATS_PERIOD_S = 0.25
MAP_PERIOD_S = 1.0
"""The page map is read less often: it walks every page held."""
IDLE_PERIOD_S = 0.5

Build = Callable[..., tuple[EngineCore, EngineReady]]


class StatusPipe:
    """Lines to the parent. A parent that does not read loses heartbeats, never an end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        if fd >= 0:
            os.set_inheritable(fd, False)

    def say(self, status: Status) -> None:
        """Write one line."""
        if self._fd < 0:
            return
        os.set_blocking(self._fd, not isinstance(status, Heartbeat))
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, encode_status(status) + b"\n")


class EngineLoop:
    """Couples one port to one `EngineCore`."""

    def __init__(self, core: EngineCore, port: Port, status: StatusPipe, *, log_stats: bool) -> None:
        self._core = core
        self._core.on_wait = self._send_stats
        self._port = port
        self._status = status
        self._next_stats_s = self._next_map_s = 0.0
        self._pictures: tuple[bytes, list[tuple[int, int, int]]] = (b"", [])
        self._throughput = ThroughputLog(time.monotonic()) if log_stats else None
        self.closing = False

    def run(self) -> None:
        """Serve until a Shutdown arrives. EngineError when the core gives up; every open request was answered then."""
        while not self.closing:
            deltas = self._take_commands()
            orphans = self._port.take_orphans()
            if orphans:
                self._core.handle(Cancel(orphans))
            if self._core.has_work():
                deltas += self._core.step()
            if deltas:
                self._port.deliver(deltas)
            self._send_stats()
            self._core.check()
        self._core.shutdown()

    def _take_commands(self) -> list[SeqDelta]:
        timeout_s = 0.0 if self._core.has_work() else IDLE_PERIOD_S
        refused: list[SeqDelta] = []
        while True:
            received = self._port.receive(timeout_s)
            if received is None:
                return refused
            commands, unread = received
            refused += unread
            for command in commands:
                refused += self._handle(command)
            timeout_s = 0.0

    def _handle(self, command: Command) -> list[SeqDelta]:
        """Shutdown and Explain are known only here; the core knows the rest. Returns the end of a request not taken."""
        if isinstance(command, Shutdown):
            self.closing = True
            return []
        if isinstance(command, Explain):
            self._port.answer(command, self._core.scheduler.history.explain(command.label))
            return []
        try:
            self._core.handle(command)
        except QuireError as error:
            if not isinstance(command, Submit):
                raise
            request = command.request
            return refusals(request.request_id, request.params.n, f"{error.code}: {error.message}")
        return []

    def _send_stats(self) -> None:
        """A snapshot if one is due; also called while the loop waits for a long step, lest it be thought dead."""
        now_s = time.monotonic()
        if now_s < self._next_stats_s:
            return
        self._next_stats_s = now_s + STATS_PERIOD_S
        with_map = now_s >= self._next_map_s
        stats = self._core.stats(with_map=with_map)
        if with_map:
            self._pictures, self._next_map_s = (stats.page_map, stats.tree), now_s + MAP_PERIOD_S
        stats.page_map, stats.tree = self._pictures
        self._port.broadcast(StepOutputs([], stats))
        self._status.say(Heartbeat(stats.last_step_age_s, stats.steps_in_flight))
        if self._throughput is not None:
            self._throughput.note(stats, now_s)


def follow_parent(address: str) -> None:
    """Leave when the parent says so; leave at once, with the socket's folder, when it is gone, however it died."""

    def wait() -> None:
        # The descriptor, not the buffered file: its lock would still be held when the interpreter shuts down.
        while data := os.read(sys.stdin.fileno(), 4096):
            if SHUTDOWN_LINE in data:
                with zmq.Context.instance().socket(zmq.DEALER) as socket:
                    socket.connect(address)
                    socket.send(encode([Shutdown()]))
        shutil.rmtree(pathlib.Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="quire-parent-watch").start()


def fetch(config: EngineConfig, status: StatusPipe) -> EngineConfig:
    """The same options with folders in the place of hub names. The parent is told how long that takes: its limit on
    loading does not hold meanwhile. Raises LoadError or ConfigError."""
    if not is_on_hub(config.model) and not is_on_hub(config.tokenizer):
        return config
    status.say(Fetching(is_over=False))
    model = str(find_checkpoint(config.model, config.revision))
    tokenizer = str(find_checkpoint(config.tokenizer, config.revision)) if config.tokenizer else ""
    status.say(Fetching(is_over=True))
    return msgspec.structs.replace(config, model=model, tokenizer=tokenizer, revision="")


def serve(config: EngineConfig, socket: zmq.Socket, status: StatusPipe, build: Build) -> int:
    """Build the engine and run its loop; returns the exit status."""
    try:
        core, ready = build(fetch(config, status), is_server=True)
    except QuireError as error:
        status.say(EngineFailed(error.message))
        return 1
    port = Port(socket, ready)
    status.say(ready)
    quiet_gc()
    try:
        EngineLoop(core, port, status, log_stats=not config.disable_log_stats).run()
    except Exception as error:
        logger.exception("the engine loop ended")
        status.say(EngineFailed(error.message if isinstance(error, QuireError) else "the engine failed; see its log"))
        return 1
    finally:
        port.close()
    return 0


def main(build: Build = build_engine) -> int:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means.
    logging.raiseExceptions = False  # a log that cannot be written (disk full, closed pipe) is no reason to stop
    logging.basicConfig(
        level=env.log_level(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessStart)
    follow_parent(start.address)
    return serve(start.config, Port.bind(start.address), StatusPipe(start.status_fd), build)


if __name__ == "__main__":
    sys.exit(main())
