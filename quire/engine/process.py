"""The engine process: reads commands from its socket, steps while there is work, sends one message a step.

Run as `python -m quire.engine.process` by `engine/process_client.py`. Ends when told to, or when its parent is gone
(end of file on standard input), or with EngineFailed and exit status 1 when steps keep failing. Owns no policy.
"""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import signal
import sys
import threading
import time

import msgspec
import zmq

from quire.core import env
from quire.core.errors import QuireError
from quire.core.events import Command, EngineFailed, FinishReason, SeqDelta, Shutdown, StepOutputs, Submit
from quire.core.sampling import MAX_N
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.engine.garbage import quiet_gc
from quire.engine.throughput import ThroughputLog
from quire.engine.wire import ProcessStart, decode_commands, encode

logger = logging.getLogger("quire.engine")

STATS_PERIOD_S = 0.25
MAP_PERIOD_S = 1.0
"""The page map is read less often: it walks every page held."""
IDLE_PERIOD_S = 1.0


class EngineLoop:
    """Couples one socket to one `EngineCore`."""

    def __init__(self, core: EngineCore, socket: zmq.Socket, *, log_stats: bool) -> None:
        self._core = core
        self._core.on_wait = self._send_stats
        self._socket = socket
        self._next_stats_s = self._next_map_s = 0.0
        self._page_map = b""
        self._throughput = ThroughputLog(time.monotonic()) if log_stats else None
        self.closing = False

    def run(self) -> None:
        """Serve until a Shutdown arrives. EngineError when the core gives up; every open request was answered then."""
        while not self.closing:
            deltas = self._take_commands()
            if self._core.has_work():
                deltas += self._core.step()
            if deltas:
                self._socket.send(encode(StepOutputs(deltas)))
            self._send_stats()
            self._core.check()
        self._core.shutdown()

    def _take_commands(self) -> list[SeqDelta]:
        timeout_s = 0.0 if self._core.has_work() else IDLE_PERIOD_S
        refused: list[SeqDelta] = []
        while self._socket.poll(timeout_s * 1000):
            commands, unread = read_commands(self._socket.recv())
            refused += unread
            for command in commands:
                refused += self._handle(command)
            timeout_s = 0.0
        return refused

    def _handle(self, command: Command) -> list[SeqDelta]:
        """The only place that knows Shutdown; the core knows the rest. Returns the end of a request not taken."""
        if isinstance(command, Shutdown):
            self.closing = True
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
            self._page_map, self._next_map_s = stats.page_map, now_s + MAP_PERIOD_S
        stats.page_map = self._page_map
        self._socket.send(encode(StepOutputs([], stats)))
        if self._throughput is not None:
            self._throughput.note(stats, now_s)


def read_commands(message: bytes) -> tuple[list[Command], list[SeqDelta]]:
    """The commands of a message that can be decoded, and error ends for submissions that cannot; the rest is logged."""
    try:
        return decode_commands(message), []
    except msgspec.DecodeError as error:
        logger.error("a message of %d bytes cannot be decoded as a whole: %s", len(message), error)
    commands: list[Command] = []
    refused: list[SeqDelta] = []
    try:
        parts = msgspec.msgpack.decode(message, type=list[msgspec.Raw])
    except msgspec.DecodeError:
        return [], []
    for part in parts:
        try:
            commands.append(msgspec.msgpack.decode(part, type=Command))
        except msgspec.DecodeError as error:
            logger.error("a command was dropped: %s", error)
            refused += _refuse_unread(part, error)
    return commands, refused


class _UnreadParams(msgspec.Struct):
    n: int = 1


class _UnreadRequest(msgspec.Struct):
    request_id: str
    params: _UnreadParams


class _UnreadSubmit(msgspec.Struct, tag="submit"):
    """What must be known of a submission to refuse it."""

    request: _UnreadRequest


def _refuse_unread(part: msgspec.Raw, error: msgspec.DecodeError) -> list[SeqDelta]:
    try:
        request = msgspec.msgpack.decode(part, type=_UnreadSubmit).request
    except msgspec.DecodeError:
        return []
    return refusals(request.request_id, min(request.params.n, MAX_N), f"engine_error: not understood: {error}")


def refusals(request_id: str, n: int, text: str) -> list[SeqDelta]:
    """The ends of a request's `n` sequences, which never started."""
    return [SeqDelta(request_id, i, [], FinishReason.ERROR, error=text) for i in range(n)]


def end_with_parent(address: str) -> None:
    """Leave at once, with the socket's folder, when the parent's end of standard input closes, however it died."""

    def wait() -> None:
        # The descriptor, not the buffered file: its lock would still be held when the interpreter shuts down.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        shutil.rmtree(pathlib.Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="quire-parent-watch").start()


def main() -> int:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means.
    logging.basicConfig(
        level=env.log_level(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessStart)
    end_with_parent(start.address)
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(start.address)
    try:
        core, ready = build_engine(start.config, is_server=True)
    except QuireError as error:
        socket.send(encode(EngineFailed(error.message)))
        socket.close()
        return 1
    socket.send(encode(ready))
    quiet_gc()
    try:
        EngineLoop(core, socket, log_stats=not start.config.disable_log_stats).run()
    except Exception as error:
        logger.exception("the engine loop ended")
        text = error.message if isinstance(error, QuireError) else "the engine failed; see its log"
        socket.send(encode(EngineFailed(text)))
        socket.close()
        return 1
    socket.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
