"""Standard output and error of a process that serves: nobody who writes there waits for a reader.

Owns `sys.stdout` and `sys.stderr` after `take_over`, and where the stacks of all threads are written. Does not own what
is said (`logs.py`). A thread for each of the two writes what was said.
Invariants: a full pipe, a full disk or a closed file costs lines, which are counted, and never time; at the end of the
process what was said is written within `FLUSH_S`; lines of several processes in one pipe do not mix.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import io
import os
import select
import signal
import stat
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_QUEUED_BYTES = 1 << 20
"""What waits for a reader; beyond it lines are dropped until half of it has been read."""
CHUNK_BYTES = select.PIPE_BUF
"""Whole lines are written together up to this size, which the system never mixes with those of other processes."""
FLUSH_S = 1.0
"""Longest wait at the end of the process."""
STACKS_SIGNAL = signal.SIGUSR1
STACKS_THREAD = "quire-stacks"


class QueuedStream(io.RawIOBase):
    """A descriptor as a stream that takes everything at once; a thread writes it, however long that takes."""

    def __init__(self, fd: int, name: str, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        """name: of the stream, for the line that counts what was dropped."""
        super().__init__()
        self._fd = fd
        self._name = name
        self._max_bytes = max_bytes
        self._pieces: collections.deque[bytes] = collections.deque()
        self._n_bytes = 0
        """Waiting or being written."""
        self._n_dropped = 0
        """Since something was last taken."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: ReadableBuffer, /) -> int:
        """Take `data`, or drop and count it when too much waits."""
        piece = bytes(data)
        with self._changed:  # reentrant: a signal's handler may write too
            limit = self._max_bytes // 2 if self._n_dropped else self._max_bytes
            if self._n_bytes + len(piece) > limit:
                self._n_dropped += 1
                return len(piece)
            if self._n_dropped:
                self._take(f"quire: {self._n_dropped} lines were dropped here: {self._name} was not read\n".encode())
                self._n_dropped = 0
            self._take(piece)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=f"quire-{self._name}")
                self._thread.start()
            self._changed.notify_all()
        return len(piece)

    def drain(self, limit_s: float = FLUSH_S) -> bool:
        """Wait until all that was taken is written; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._n_bytes, limit_s)

    def _take(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._n_bytes += len(piece)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces)
                chunk = self._pieces.popleft()
                while self._pieces and len(chunk) + len(self._pieces[0]) <= CHUNK_BYTES:
                    chunk += self._pieces.popleft()
            self._put(chunk)
            with self._changed:
                self._n_bytes -= len(chunk)
                self._changed.notify_all()

    def _put(self, chunk: bytes) -> None:
        left = memoryview(chunk)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # whoever shares the file has made it so
                select.select([], [self._fd], [])
            except OSError:  # a full disk, a closed pipe
                return


def hold_standard_files() -> None:
    """Open /dev/null where stdin, stdout or stderr is closed: no socket must get their numbers, and what is printed to
    a stderr that is not there must not come out at stdout. To be called before anything else is opened."""
    number = os.open(os.devnull, os.O_RDWR)
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False, errors="backslashreplace"))  # noqa: SIM115


def take_over() -> None:
    """Put a `QueuedStream` behind `sys.stdout` and `sys.stderr` (idempotent); both are drained at the end."""
    hold_standard_files()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if isinstance(getattr(old, "buffer", None), QueuedStream):
            continue
        if old is not None:
            with contextlib.suppress(OSError):
                old.flush()
        queued = QueuedStream(fd, name)
        encoding = getattr(old, "encoding", None) or "utf-8"
        # A character that the terminal does not know is no reason to fail.
        stream = io.TextIOWrapper(queued, encoding, "backslashreplace", line_buffering=True)  # type: ignore[type-var]
        setattr(sys, name, stream)
        atexit.register(queued.drain)


def drain() -> None:
    """Wait until what was said is written, at most `FLUSH_S` for each stream: this process is about to be ended by
    others, or without its interpreter's own end."""
    for stream in (sys.stdout, sys.stderr):
        queued = getattr(stream, "buffer", None)
        if isinstance(queued, QueuedStream):
            queued.drain()


def show_stacks_on_signal() -> None:
    """From now on SIGUSR1, and a signal that ends the process as a crash, write the stacks of all threads to stderr
    (idempotent; called by the main thread).

    For SIGUSR1 a thread of Python's does it, which has the interpreter meanwhile: `faulthandler.register` looks at
    threads that go on, and now and then ends the process with that. Threads that were there before do not block the
    signal; what they catch the main thread deals with. A process whose interpreter stands still shows its stacks when
    it is ended (`Child.abort`).
    """
    fd = _stacks_fd()
    faulthandler.enable(fd)
    signal.signal(STACKS_SIGNAL, lambda *_: faulthandler.dump_traceback(fd))
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
    if not any(thread.name == STACKS_THREAD for thread in threading.enumerate()):
        threading.Thread(target=_show_stacks, args=(fd,), daemon=True, name=STACKS_THREAD).start()


def _show_stacks(fd: int) -> None:
    while True:
        signal.sigwait({STACKS_SIGNAL})
        faulthandler.dump_traceback(fd)


def _stacks_fd() -> int:
    """Stderr for writers that cannot wait. Signal handlers write it themselves: behind a full pipe they would stand
    still for good, and the rest of a dump is worth less than the process. A pipe or terminal is opened a second time,
    because O_NONBLOCK on stderr itself would be on everybody's who shares it."""
    mode = os.fstat(2).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(2):
        with contextlib.suppress(OSError):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return 2
