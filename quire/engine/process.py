"""The engine process: reads commands from its socket, steps while there is work, sends one message a step.

Run as `python -m quire.engine.process` by `engine/process_client.py`. Ends when told to, or when its parent is gone
(end of file on standard input). Owns no policy.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time

import msgspec
import zmq

from quire.core import env
from quire.core.errors import QuireError, RequestError
from quire.core.events import Command, EngineFailed, FinishReason, SeqDelta, Shutdown, StepOutputs, Submit
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.engine.wire import ProcessStart, decode_commands, encode

logger = logging.getLogger("quire.engine")

STATS_PERIOD_S = 0.25
IDLE_PERIOD_S = 1.0


class EngineLoop:
    """Couples one socket to one `EngineCore`."""

    def __init__(self, core: EngineCore, socket: zmq.Socket) -> None:
        self._core = core
        self._socket = socket
        self._next_stats_s = 0.0
        self.closing = False

    def run(self) -> None:
        """Serve until a Shutdown arrives."""
        while not self.closing:
            deltas = self._take_commands()
            if self._core.has_work():
                deltas += self._core.step()
            self._send(deltas)
        self._core.shutdown()

    def _take_commands(self) -> list[SeqDelta]:
        timeout_s = 0.0 if self._core.has_work() else IDLE_PERIOD_S
        refused: list[SeqDelta] = []
        while self._socket.poll(timeout_s * 1000):
            for command in decode_commands(self._socket.recv()):
                refused += self._handle(command)
            timeout_s = 0.0
        return refused

    def _handle(self, command: Command) -> list[SeqDelta]:
        if isinstance(command, Shutdown):
            self.closing = True
            return []
        try:
            self._core.handle(command)
        except RequestError as error:
            assert isinstance(command, Submit)
            request = command.request
            text = f"{error.code}: {error.message}"
            return [
                SeqDelta(request.request_id, i, [], FinishReason.ERROR, error=text) for i in range(request.params.n)
            ]
        return []

    def _send(self, deltas: list[SeqDelta]) -> None:
        now_s = time.monotonic()
        stats = None
        if now_s >= self._next_stats_s:
            stats = self._core.stats()
            self._next_stats_s = now_s + STATS_PERIOD_S
        if deltas or stats is not None:
            self._socket.send(encode(StepOutputs(deltas, stats)))


def quiet_gc() -> None:
    """What is loaded stays, young objects are looked at seldom: default thresholds cost up to 20 ms a step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def end_with_parent() -> None:
    """Leave at once when the parent's end of standard input closes, however it died."""

    def wait() -> None:
        # The descriptor, not the buffered file: its lock would still be held when the interpreter shuts down.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="quire-parent-watch").start()


def main() -> int:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means.
    logging.basicConfig(
        level=env.read("QUIRE_LOG_LEVEL", "INFO"), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessStart)
    end_with_parent()
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(start.address)
    try:
        core, ready = build_engine(start.config)
    except QuireError as error:
        socket.send(encode(EngineFailed(error.message)))
        socket.close()
        return 1
    socket.send(encode(ready))
    quiet_gc()
    try:
        EngineLoop(core, socket).run()
    except Exception:
        logger.exception("the engine loop ended")
        socket.send(encode(EngineFailed("the engine failed; see its log")))
        socket.close()
        return 1
    socket.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
