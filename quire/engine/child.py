"""A process that this one has started: its first line, what it reports through a pipe, its end.

Owns the process and both pipes. Does not own what is said, nor when it ends (`supervisor.py`,
`serve/api_processes.py`).
Invariants: it leaves when this process is gone (end of file on its standard input); it gets signals only once it can
deal with them; nothing here waits for it but `end`, and that for `KILLED_S` at most; what it has started in its process
group ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from quire.core.errors import EngineError
from quire.core.interpreter import python
from quire.core.shortage import shortage
from quire.engine.process_state import is_stopped
from quire.engine.stdio import STACKS_SIGNAL

logger = logging.getLogger("quire.engine")

DUMP_S = 0.5
"""For writing the stacks of a process that is going to be killed."""
KILLED_S = 5.0
"""Longest wait for a killed process: one whose file system is gone may stay in the kernel for good."""
LOOK_S = 0.02


def status_text(code: int) -> str:
    """An exit status as people read it."""
    if code >= 0:
        return f"exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"{name}, which the system sends when memory runs out, and people with kill -9"
    return name


def read_start(fd: int = 0) -> tuple[bytes, bytes]:
    """In a process that was started so: its first line, and what was read of the next ones already."""
    data = b""
    while b"\n" not in data:
        more = os.read(fd, 65536)
        if not more:
            break
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


class Child:
    """See the module. Made inside a running event loop."""

    def __init__(
        self,
        command: Sequence[str],
        first_line: Callable[[int], bytes],
        hear: Callable[[bytes], None],
        inherited: Sequence[int] = (),
    ) -> None:
        """Start `python COMMAND`. EngineError if the system has no room for it.

        first_line: what it reads first, made from the number of the descriptor into which it reports.
        hear: gets each line of these reports. inherited: descriptors that it keeps.
        """
        self.gone = asyncio.Event()
        """Its pipe has ended: the process is gone or about to be."""
        self.heard_s = time.monotonic()
        """When it reported last."""
        self._hear = hear
        self._unread = b""
        # A session of its own: Ctrl-C in a terminal reaches only this process, which decides what it means. Signals
        # that would end it before it has handlers wait until it lets them in; the mask outlives exec.
        waiting = {STACKS_SIGNAL, signal.SIGHUP}
        try:
            self._fd, writing = os.pipe()
            try:
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
                self._process = subprocess.Popen(
                    python(*command), stdin=subprocess.PIPE, pass_fds=(writing, *inherited),
                    start_new_session=True,
                )  # fmt: skip
            except OSError:
                os.close(self._fd)
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                os.close(writing)
        except OSError as error:
            raise EngineError(f"a process could not be started: {shortage(error)}") from None
        os.set_blocking(self._fd, False)
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        self.say(first_line(writing))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit status, minus the signal that has ended it; None while it lives. What it leaves in its process group
        is killed before its number can be another's."""
        if self._process.returncode is None and self._has_ended():
            self._kill_group()
        return self._process.poll()

    def say(self, line: bytes) -> None:
        """Write to its standard input."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):  # it is gone, which its pipe says too
                stdin.write(line)
                stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it lives."""
        if self.code is None:
            self._process.send_signal(number)

    def is_stopped(self) -> bool:
        """True if somebody has stopped it with a signal, as a debugger does."""
        return is_stopped(self.pid)

    def show_stacks(self) -> None:
        """Have it write the stacks of its threads to stderr, if its interpreter still does anything."""
        self.signal(STACKS_SIGNAL)

    async def abort(self) -> None:
        """End it so that it writes the stacks of its threads to stderr even if its interpreter stands still; it has
        `DUMP_S` for that, and `end` is still to be called. No core is dumped: that can take as long as the start."""
        with contextlib.suppress(OSError):
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, resource.prlimit(self.pid, resource.RLIMIT_CORE)[1]))
        self.signal(signal.SIGABRT)
        await self.wait(DUMP_S)

    async def wait(self, limit_s: float) -> int | None:
        """Its exit status, None if it lives after `limit_s`."""
        end_s = time.monotonic() + limit_s
        while self.code is None and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)
        return self.code

    async def end(self) -> int | None:
        """Kill it if it lives, with its process group, and free everything (idempotent); its exit status, None if it
        cannot be ended."""
        if self.code is None:
            self._kill_group()
        code = await self.wait(KILLED_S)
        if code is None:
            logger.error("process %d was killed and does not end", self.pid)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._close()
        return code

    def _has_ended(self) -> bool:
        """Without taking its exit status, which would free its number."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._close()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        self.heard_s = time.monotonic()
        for line in lines:
            self._hear(line)

    def _close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self.gone.set()
