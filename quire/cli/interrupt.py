"""What Ctrl-C does where KeyboardInterrupt is no good: while libraries load, and while an answer is made. SIGTERM where
something half made has to be removed.

Loading libraries swallow it or make tracebacks of it, so the process ends instead; an answer stops between two parts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from quire.cli.main import CODE, LINE


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


@contextlib.contextmanager
def terminated_tidily() -> Iterator[None]:
    """While the block runs, the first SIGTERM prints one line and raises SystemExit of 143, so that contexts are left;
    later ones do not disturb that. Main thread only."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            print("\nquire: terminated", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Stop:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.pressed = False

    def press(self, *_: object) -> None:
        """Handle SIGINT: the first is noted, the next raises KeyboardInterrupt."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@contextlib.contextmanager
def first_noted() -> Iterator[Stop]:
    """While the block runs, the first Ctrl-C is only noted, so that no step of the engine is torn. Main thread only."""
    stop = Stop()
    previous = signal.signal(signal.SIGINT, stop.press)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def _end(*_: object) -> None:
    with contextlib.suppress(OSError):
        print(LINE, file=sys.stderr, flush=True)
    os._exit(CODE)
