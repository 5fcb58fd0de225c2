"""The engine's side of its grammar processes: starts the first one, asks it for children, hears what became of them.

Owns the first process and the making of sockets. Does not own what is asked of children (`trials.py`,
`link.py`). Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Final

from quire.core.errors import EngineError
from quire.core.interpreter import python
from quire.engine.child import status_text
from quire.engine.grammars.wire import LEFT_ALONE, Channel, Died, GrammarSettings, Report, decode_report, encode

COMMAND: Final = ("-m", "quire.engine.grammars.process")
LEAVE_S: Final = 2.0
END_S: Final = 0.2
"""Within which a process that was killed has ended."""


class GrammarProcesses:
    """See the module. Nothing is started before the first `fork` or `start`."""

    def __init__(self, settings: GrammarSettings, command: tuple[str, ...] = COMMAND) -> None:
        """command: what Python runs instead of the module; for tests."""
        self.settings = settings
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the first process, if there is none; it loads the tokenizer in its own time."""
        with self._lock:
            self._started()

    def fork(self, kind: bytes, memory: Sequence[int] = ()) -> Channel:
        """A connection to a new child; closing it kills the child. memory: descriptors that the child maps. Raises
        EngineError if there can be none."""
        with self._lock:
            try:
                ours, theirs = socket.socketpair()
                with theirs:
                    fds = [theirs.fileno(), *memory]
                    try:
                        socket.send_fds(self._started(), [kind], fds)
                    except OSError:  # the first process is gone: the next one
                        self._end()
                        socket.send_fds(self._started(), [kind], fds)
                return Channel(ours)
            except OSError as error:
                raise EngineError(f"no process for grammars can be started: {error.strerror or error}") from None

    def ending(self, died: Died) -> str:
        """What ended a child, for people: its signal, what it failed of, or the end of the first process, which takes
        its children along before one of them can say a word."""
        if died.signal or died.why:
            return died.why or status_text(-died.signal)
        code = None
        with self._lock, contextlib.suppress(subprocess.TimeoutExpired):
            code = None if self._process is None else self._process.wait(END_S)  # its children may be seen to end first
        gone = f"the process that it comes from ended: {status_text(code or 0)}"
        return "it left without a word" if code is None else gone

    def close(self) -> None:
        """End them all."""
        with self._lock:
            self._end()

    def _started(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_ALONE)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    python(*self._command, str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._control = ours
        ours.send(encode(self.settings))
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._process = None


def hear(connection: Channel) -> Report:
    """The next report of a child; `Died` if there is none any more, or if it was cut short."""
    try:
        return decode_report(connection.receive())
    except (EOFError, OSError, ValueError):  # msgspec.DecodeError is a ValueError
        return Died()
