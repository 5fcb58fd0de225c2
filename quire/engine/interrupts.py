"""Ctrl-C between two steps, and not within one: an engine that is left in the middle of a step has lost its place."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """SIGINT is answered at the end of it, as it would have been within; a second one at once, for what hangs.

    Nothing is changed in other threads, to which no signal comes, nor where nobody in Python answers it."""
    answer = signal.getsignal(signal.SIGINT)
    if not callable(answer) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        if len(came) > 1:
            answer(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
        if len(came) == 1:
            answer(signal.SIGINT, came[0])
