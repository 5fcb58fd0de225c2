"""What a rank of a node writes to its log.

Owns the pipe and the end of the text. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

SAID_BYTES: Final = 1 << 16
"""So much of it is kept."""


class RankLog:
    """What a rank writes: goes on to this process's own, and the end of it is kept."""

    def __init__(self) -> None:
        self._fd, self.writing = os.pipe()
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="quire-node-log")
        self._thread.start()

    def tail(self, wait_s: float = 0.0) -> str:
        """What came last. wait_s: for its end."""
        self._thread.join(wait_s)
        return bytes(self._tail).decode(errors="replace")

    def forget(self) -> None:
        """What has come so far."""
        self._tail.clear()

    def _copy(self) -> None:
        while data := os.read(self._fd, 65536):
            self._tail += data
            del self._tail[:-SAID_BYTES]
            with contextlib.suppress(OSError):  # nobody reads it
                sys.stderr.buffer.write(data)
                sys.stderr.flush()
        os.close(self._fd)
