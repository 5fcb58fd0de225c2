"""A rank's process: it does what rank 0 does, as it is told through the ring, and says nothing but why it ends.

Run as `python -m quire.engine.ranks.process` by `group.py`. Ends when told to, with the process of rank 0 however that
dies, also while it is stopped itself, and at the first error: the others wait for it then, and cannot go on. Signals
that end programs are for rank 0. Owns no policy.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from quire.core.errors import ConfigError, DeviceOutOfMemory, LoadError, QuireError
from quire.core.events import EndKind
from quire.engine import logs, stdio
from quire.engine.child import read_start
from quire.engine.executors.executor import is_out_of_memory
from quire.engine.garbage import no_gc
from quire.engine.ranks.done import DoneSteps
from quire.engine.ranks.ring import STARTING, RankMemory
from quire.engine.ranks.start import RankFailed, RankStart

logger = logging.getLogger("quire.engine")

BEAT_S: Final = 0.25
_PR_SET_PDEATHSIG: Final = 1


class Calls(Protocol):
    """What a rank has begun to say to others."""

    @property
    def n_calls(self) -> int:
        """Of groups in which all make the same."""
        ...


class Pulse:
    """A thread that says that this process lives, and how far it is."""

    def __init__(self, memory: RankMemory, rank: int) -> None:
        self._memory, self._rank = memory, rank
        self.calls: Calls | None = None
        self.done: DoneSteps | None = None
        memory.set_state(rank, STARTING)
        threading.Thread(target=self._run, daemon=True, name="quire-pulse").start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT_S):
            n_calls, n_done = (
                0 if self.calls is None else self.calls.n_calls,
                0 if self.done is None else self.done.count(),
            )
            self._memory.beat(self._rank, n_calls, n_done)


def be_killed_with_parent() -> None:
    """Die with the thread that has started this process, even while it is stopped or in a loop."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:  # the parent may have died before that call
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="quire-parent-watch").start()


def failure(start: RankStart, error: Exception) -> RankFailed:
    """What to say of an error that ends the rank."""
    name = f"rank {start.rank}" + (f" on node {start.config.node_rank}" if start.config.nnodes > 1 else "")
    if isinstance(error, (ConfigError, LoadError)):
        return RankFailed(f"{name}: {error.message}", EndKind.REFUSED)
    reason = error.message if isinstance(error, QuireError) else f"{type(error).__name__}: {error}".partition("\n")[0]
    reason += place_of(error)
    if isinstance(error, DeviceOutOfMemory) or is_out_of_memory(error):
        return RankFailed(f"{name} ran out of memory ({reason}); its stack is in the log", EndKind.KILLED)
    return RankFailed(f"{name} failed ({reason}); its stack is in the log", EndKind.CRASH)


def place_of(error: Exception) -> str:
    """The innermost place in Quire that the error has come through, as `, at norm/op.py:12 in rms_norm`; may be
    empty."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}quire{os.sep}" in frame.filename]
    if not own:
        return ""
    return f", at {os.sep.join(own[-1].filename.split(os.sep)[-2:])}:{own[-1].lineno} in {own[-1].name}"


def tell_failure(start: RankStart, error: Exception) -> None:
    """Say why the rank ends, to the log and to rank 0, which then kills this process. To be called where the error is
    handled."""
    logger.exception("rank %d ends", start.rank)
    stdio.drain()
    os.write(start.status_fd, msgspec.json.encode(failure(start, error)) + b"\n")


def main(run: Callable[[RankStart, RankMemory, Pulse], None] | None = None) -> int:
    """Entry point of the process. run: the life of the rank, for tests; None: `rank.run_rank`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line, _ = read_start()
    start = msgspec.json.decode(line, type=RankStart)
    logs.set_up(f"rank {start.rank}")
    # rank 0 says it for all; builds that fail and slow references have another name, as they may be this rank's alone
    logging.getLogger("quire.kernels.choice").setLevel(logging.ERROR)
    be_killed_with_parent()
    memory = RankMemory(start.memory_fd, start.shape.n_ranks)
    pulse = Pulse(memory, start.rank)
    try:
        if run is None:  # torch is imported here and not above: a sign of life comes first
            with no_gc():
                run = importlib.import_module("quire.engine.ranks.rank").run_rank
        run(start, memory, pulse)
    except Exception as error:
        tell_failure(start, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
