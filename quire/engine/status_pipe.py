"""The pipe on which an engine's process says to its parent how it is.

Owns which of it may get lost. Does not own what is said (`core.events.Status`) nor who hears it (`supervisor.py`).
"""

from __future__ import annotations

import contextlib
import os

from quire.core.events import Heartbeat, Status
from quire.engine.wire import encode_status


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
