"""Ctrl-C while libraries load: they swallow KeyboardInterrupt or make tracebacks of it, so the process ends instead."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

LINE = "\nquire: interrupted"
CODE = 130


@contextlib.contextmanager
def instant_exit() -> Iterator[None]:
    """While the block runs, Ctrl-C prints one line and ends the process with 130; nothing is released first.

    For imports and for loading a model into this process, where nothing outlives the process. Main thread only.
    """
    previous = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(*_: object) -> None:
    print(LINE, file=sys.stderr, flush=True)
    os._exit(CODE)
