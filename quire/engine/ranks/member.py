"""One rank beside rank 0, as whoever has started its process sees it: its two pipes, where it stands, its end.

Owns the process. Does not own when it ends (`group.py`), nor what it does (`rank.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from typing import Final

import msgspec

from quire.core.events import EndKind
from quire.core.interpreter import python
from quire.engine import stdio
from quire.engine.child import DUMP_S, KILLED_S, LOOK_S, status_text
from quire.engine.executors.executor import RanksLost
from quire.engine.process_state import state_words
from quire.engine.ranks.ring import RankMemory, Standing
from quire.engine.ranks.start import RankFailed, RankStart
from quire.engine.stdio import STACKS_SIGNAL

logger = logging.getLogger("quire.engine")

RANK_COMMAND: Final = ("-m", "quire.engine.ranks.process")
REASON_S: Final = 2.0
"""Between the end of a process's pipe and its exit status."""


class LocalRank:
    """A process of this machine."""

    def __init__(
        self,
        start: RankStart,
        status_fd: int,
        memory: RankMemory,
        place: str = "",
        stderr: int | None = None,
        *,
        in_own_session: bool = True,
    ) -> None:
        """Start it, and close what only it needs. status_fd: where it is read why it ends. memory: in which it says
        where it is. place: where messages say it is. stderr: None: that of this process. in_own_session: else whoever
        ends this process group ends it, too. OSError: there is no room; nothing is open that was given to it."""
        self.number = start.rank
        self.status_fd = status_fd
        self._memory, self._place = memory, place
        waiting = {STACKS_SIGNAL, signal.SIGHUP}  # until it has handlers, as `Child` has it
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
        try:
            self.process = subprocess.Popen(
                python(*RANK_COMMAND), stdin=subprocess.PIPE, stderr=stderr, pass_fds=start.fds,
                start_new_session=in_own_session,
            )  # fmt: skip
        except OSError:
            os.close(status_fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(start.status_fd)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, which its pipe says too
            self.process.stdin.write(msgspec.json.encode(start) + b"\n")
            self.process.stdin.flush()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"rank {self.number} (process {self.pid}{self._place})"

    def standing(self) -> Standing:
        """Where it is, as it said last."""
        return self._memory.standing(self.number)

    def state_words(self) -> str:
        """What the kernel says of one that does not answer; mostly nothing."""
        return state_words(self.pid)

    def loss(self) -> tuple[RanksLost, bool]:
        """Why it is gone, in its own words if it has left any; and whether the lack of another may be the reason."""
        said = b""
        with contextlib.suppress(OSError):
            said = os.read(self.status_fd, 65536)
        with contextlib.suppress(msgspec.DecodeError):
            failed = msgspec.json.decode(said, type=RankFailed)
            return RanksLost(failed.message, failed.kind), failed.kind is EndKind.CRASH
        code = self.wait(REASON_S)
        status = "an unknown end" if code is None else status_text(code)
        kind = EndKind.KILLED if code == -signal.SIGKILL or code == -signal.SIGTERM else EndKind.CRASH
        return RanksLost(f"{self.name} ended with {status}", kind), False

    def show_stacks(self) -> None:
        """Have it write the stacks of its threads to the log, also if it was stopped; it is to be ended afterwards.

        A thread of its own writes them, with the interpreter, if it gets that: then it says that it lives, too. Else a
        signal that ends it does, which looks at threads that may go on, and now and then crashes over one.
        """
        logger.error("the stacks of rank %d follow", self.number)
        stdio.drain()  # they do not wait in a queue
        began_s = time.monotonic()
        self._signal(STACKS_SIGNAL, signal.SIGCONT)
        while self.wait(LOOK_S) is None and (since_s := time.monotonic() - began_s) < DUMP_S:
            if self.standing().silent_s < since_s:
                self.wait(DUMP_S)
                return
        self._signal(signal.SIGABRT)
        self.wait(DUMP_S)

    def _signal(self, *numbers: int) -> None:
        for number in numbers:
            with contextlib.suppress(OSError):  # it is gone
                self.process.send_signal(number)

    def wait(self, limit_s: float) -> int | None:
        """Its exit status, None if it lives so long."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Kill it if it lives, and free everything."""
        self.process.kill()
        if self.wait(KILLED_S) is None:
            logger.error("rank %d (process %d) was killed and does not end", self.number, self.pid)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        os.close(self.status_fd)
