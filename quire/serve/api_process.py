"""One API process of several: `python -m quire.serve.api_process`, started by `serve/api_processes.py`.

Owns its end with its parent: what it is told and what it reports. Does not own the engine: it shares the one that the
parent supervises.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading

import msgspec

from quire.core.errors import ConfigError, EngineError
from quire.core.shortage import shortage
from quire.engine.async_llm import AsyncLLM
from quire.engine.child import read_start
from quire.serve.api_processes import (
    BEAT,
    BEAT_S,
    DRAIN,
    EXIT_BAD_OPTIONS,
    EXIT_FAILED,
    FORCE,
    READY,
    REFUSED,
    ApiProcessStart,
)
from quire.serve.server import Service, bind, fail, prepare_process, run_service


class Parent:
    """The process that has started this one, at the other ends of standard input and of the status pipe."""

    def __init__(self, unread: bytes, status_fd: int, beat_s: float) -> None:
        """unread: what it has said after the first line and was read with that."""
        self._unread = unread
        self._fd = status_fd
        self._beat_s = beat_s
        os.set_blocking(status_fd, False)
        os.set_inheritable(status_fd, False)

    def report(self, line: bytes) -> None:
        """Say something; a parent that does not read, because it is stopped, misses it."""
        with contextlib.suppress(OSError):
            os.write(self._fd, line + b"\n")

    async def accompany(self, service: Service) -> None:
        """Obey the parent, and report for as long as the event loop runs."""
        loop = asyncio.get_running_loop()
        orders = {DRAIN: service.stop, FORCE: service.force}

        def wait() -> None:
            data = self._unread
            while True:
                *lines, data = data.split(b"\n")
                for line in lines:
                    with contextlib.suppress(RuntimeError):  # the loop is closed: this process is leaving
                        loop.call_soon_threadsafe(orders[line])
                more = os.read(0, 4096)
                if not more:
                    os._exit(1)
                data += more

        # A thread: it must leave at once when the parent is gone, however that died, also when the loop hangs.
        threading.Thread(target=wait, daemon=True, name="quire-parent-watch").start()
        while True:
            self.report(BEAT)
            await asyncio.sleep(self._beat_s)


def main() -> int:
    """Entry point of the process."""
    prepare_process()
    line, unread = read_start()
    start = msgspec.json.decode(line, type=ApiProcessStart)
    limit_s = start.server.api_stall_timeout
    parent = Parent(unread, start.status_fd, min(BEAT_S, limit_s / 4) if limit_s else BEAT_S)
    try:
        listener = bind(start.server, shared=True, listens=not start.others_serve)
        service = Service(
            start.server,
            listener,
            lambda: AsyncLLM.connect(start.engine, start.address, start.index),
            on_ready=lambda: parent.report(READY),
            on_refused=lambda error: parent.report(REFUSED + msgspec.json.encode(error.message)),
            beside=parent.accompany,
            listens_late=start.others_serve,
        )
    except ConfigError as error:
        return fail(error, EXIT_BAD_OPTIONS)
    service.state.metrics.share(start.folder, start.index)
    try:
        return run_service(service)
    except (OSError, MemoryError, RuntimeError) as error:
        reason = shortage(error)
        if reason is None:
            raise
        return fail(EngineError(reason), EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
