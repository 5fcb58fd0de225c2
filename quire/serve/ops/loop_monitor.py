"""How late the event loop comes round, and where it was held when that was too long.

Owns one timer on the loop and one thread beside it. Does not own the text of /metrics (`metrics.py`).
The timer compares the time at which it was due with the time at which it runs, and with the CPU time of the loop's
thread; the thread takes the loop's stack while the timer is overdue. Three causes are told apart:
the loop's own thread computed ("loop"), it waited while another thread of this process kept the interpreter
("interpreter"), or the machine had no core for it. Only the first two are the program's fault and are warned of;
that another thread kept the interpreter because it had no core itself is the machine's too.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger("quire.serve")

PERIOD_S = 0.025
"""Between two beats of the timer."""
LOOK_S = 0.05
"""Between two looks of the thread."""
REST_S = 0.5
"""Between two beats, and two looks, of a server that has nothing to do."""
REST_AFTER_S = 1.0
LIMIT_S = 0.05
MAX_FRAMES = 6
N_NEIGHBOURS = 3
"""Other threads that a warning names at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lag:
    """One beat of the timer that came late. Seconds."""

    late_s: float
    """Between the time it was due and the time it ran."""
    loop_s: float
    """Of these, computed by the loop's own thread."""
    interpreter_s: float
    """Of these, waited for the interpreter while other threads of this process computed; an upper bound."""

    @property
    def held_s(self) -> float:
        """The part that is this program's doing."""
        return max(self.loop_s, self.interpreter_s)

    def __str__(self) -> str:
        own, others = f"{1000 * self.loop_s:.0f} ms of its own work", f"{1000 * self.interpreter_s:.0f}"
        return f"{1000 * self.late_s:.0f} ms ({own}, {others} ms behind other threads)"


class LoopMonitor:
    """See the module. `note` is called on the loop with every beat."""

    def __init__(self, note: Callable[[Lag], None], limit_s: float = LIMIT_S) -> None:
        self._note = note
        self.limit_s = limit_s
        """Above it a warning is logged."""
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None
        self._ident = 0
        self._run_delay = _RunDelay()
        self._n_beats = 0
        self._n_open = 0
        self._busy_until_s = 0.0
        self._is_resting = False
        self._due_s = self._cpu_s = self._process_s = self._delay_s = 0.0
        self._late = (-1, Lag(0.0, 0.0, 0.0), 0.0)
        """Number of the newest beat that came too late, how late, and how long the loop waited with a core for it."""
        self._is_closed = False
        self._woken = threading.Event()

    def start(self) -> None:
        """Watch the running loop, from its own thread."""
        self._loop, self._ident = asyncio.get_running_loop(), threading.get_ident()
        self._run_delay = _RunDelay(threading.get_native_id())
        self._schedule()
        threading.Thread(target=self._watch, daemon=True, name="quire-loop-monitor").start()

    def close(self) -> None:
        """Stop watching (idempotent)."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._run_delay.close()
            self._timer = None

    def enter(self) -> None:
        """A request begins: from now on the loop is watched closely."""
        self._n_open += 1
        if self._is_resting and self._timer is not None:
            self._timer.cancel()
            self._schedule()
            self._woken.set()

    def leave(self) -> None:
        """A request has ended."""
        self._n_open -= 1

    def _schedule(self) -> None:
        now_s = time.monotonic()
        if self._n_open:
            self._busy_until_s = now_s + REST_AFTER_S
        self._is_resting = now_s > self._busy_until_s
        self._cpu_s, self._process_s = time.thread_time(), time.process_time()
        self._delay_s = self._run_delay.read_s()
        period_s = REST_S if self._is_resting else PERIOD_S
        self._due_s = now_s + period_s
        self._timer = self._loop.call_later(period_s, self._beat)

    def _beat(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due_s)
        own_s = time.thread_time() - self._cpu_s
        loop_s = min(late_s, own_s)
        others_s = time.process_time() - self._process_s - own_s
        waited_s = late_s - loop_s - (self._run_delay.read_s() - self._delay_s)
        lag = Lag(late_s, loop_s, max(0.0, min(waited_s, others_s)))
        if lag.held_s > self.limit_s:
            self._late = (self._n_beats, lag, waited_s)
        self._note(lag)
        self._schedule()
        self._n_beats += 1

    def _watch(self) -> None:
        reported, watched, before = -1, -1, self._times_by_thread()
        places: collections.Counter[str] = collections.Counter()
        while not self._is_closed and not self._loop.is_closed():
            if self._is_resting:
                self._woken.wait(REST_S)
                self._woken.clear()
            else:
                time.sleep(LOOK_S)
            (number, lag, waited_s), n_beats = self._late, self._n_beats
            if number > reported:
                reported = number
                place = places.most_common(1)[0][0] if number == watched else "nobody looked in time"
                now = self._times_by_thread()
                if max(lag.loop_s, min(lag.interpreter_s, waited_s - delayed_s(before, now))) > self.limit_s:
                    logger.warning("the event loop was held for %s: %s%s", lag, place, self._neighbours(before, now))
            if time.monotonic() - self._due_s < self.limit_s / 2:
                before = self._times_by_thread()
                continue
            if watched != n_beats:
                watched = n_beats
                places.clear()
            places[place_of(sys._current_frames().get(self._ident))] += 1

    def _times_by_thread(self) -> dict[int, tuple[float, float]]:
        """Seconds that each other thread has computed and has waited for a core, from Linux; a clock of a thread that
        has just ended must not be read."""
        found = {}
        for thread in threading.enumerate():
            if thread.ident is not None and thread.ident not in (self._ident, threading.get_ident()):
                with contextlib.suppress(OSError), open(f"/proc/self/task/{thread.native_id}/schedstat", "rb") as file:
                    cpu_ns, delay_ns, _ = file.read().split()
                    found[thread.ident] = (int(cpu_ns) / 1e9, int(delay_ns) / 1e9)
        return found

    def _neighbours(self, before: dict[int, tuple[float, float]], now: dict[int, tuple[float, float]]) -> str:
        """The threads that computed between, and where they are now."""
        frames, names = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
        used = [(cpu_s - before.get(ident, (0.0, 0.0))[0], ident) for ident, (cpu_s, _) in now.items()]
        busy = sorted((one for one in used if one[0] > self.limit_s / 2), reverse=True)[:N_NEIGHBOURS]
        return "".join(
            f"; {names.get(ident)} computed for {1000 * cpu_s:.0f} ms, now at {place_of(frames.get(ident), 2)}"
            for cpu_s, ident in busy
        )


def delayed_s(before: dict[int, tuple[float, float]], now: dict[int, tuple[float, float]]) -> float:
    """Seconds that threads have waited for a core between, all together."""
    return sum(delay_s - before.get(ident, (0.0, 0.0))[1] for ident, (_, delay_s) in now.items())


def place_of(frame: FrameType | None, n: int = MAX_FRAMES) -> str:
    """The innermost `n` calls as `file:line`, outermost first."""
    calls: list[str] = []
    while frame is not None and len(calls) < n:
        calls.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(calls)) or "nowhere"


class _RunDelay:
    """How long a thread has waited for a core, from Linux' schedstat; 0 where the kernel does not say."""

    def __init__(self, native_id: int = -1) -> None:
        self._fd = -1
        if native_id >= 0:
            try:
                self._fd = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._fd = -1

    def read_s(self) -> float:
        """Seconds since the thread began."""
        if self._fd < 0:
            return 0.0
        fields = os.pread(self._fd, 80, 0).split()
        return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
