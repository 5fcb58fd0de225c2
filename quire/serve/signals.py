"""What signals mean to a process that serves. Owns SIGINT, SIGTERM and SIGHUP; SIGUSR1 is in `engine/stdio.py`.

SIGHUP is two things: operators send it so that files are read or opened again, the system sends it when the terminal is
closed. The terminal says which: one that was closed is hung up. Whoever started the server with SIGHUP ignored, as
nohup does, has it ignored.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable


def ignore_hangups_until_served() -> None:
    """Before there is an event loop, a SIGHUP is no reason to end."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _ignore)


def on_signals(stop: Callable[[int], None], reload: Callable[[], None]) -> None:
    """Inside a running event loop: `stop` with its number at each SIGINT and SIGTERM, and when the terminal is closed;
    `reload` at any other SIGHUP."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
        loop.add_signal_handler(signal.SIGHUP, lambda: stop(signal.SIGHUP) if _has_hung_up(terminals) else reload())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _ignore(*_: object) -> None:
    """Unlike SIG_IGN it is not passed on to child processes."""


def _has_hung_up(fds: list[int]) -> bool:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
