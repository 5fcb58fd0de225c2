"""The other ranks of an engine, seen from rank 0: their start, what they are told, whether they live, their end.

Owns those of this machine, the memory that is shared with them and the folder in which all meet. Does not own other
machines (`nodes.py`), what ranks do (`rank.py`), nor what becomes of requests when one is lost (`engine/core`,
`engine/process`).
Invariants: one lost rank ends all others, at once, for they wait for it; why is said once; no rank outlives this
process. A rank that somebody has stopped is lost as one that hangs: the others stand still with it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import pathlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.config.nodes import ranks_of_node
from quire.core.events import EndKind
from quire.core.plan import StepPlan
from quire.core.shortage import shortage
from quire.engine.executors.executor import RanksLost
from quire.engine.owned_folders import OwnedFolder
from quire.engine.ranks.done import DoneSteps
from quire.engine.ranks.judge import LATE_S, LOST_S, Judge
from quire.engine.ranks.member import LocalRank
from quire.engine.ranks.nodes import Nodes
from quire.engine.ranks.process import Calls
from quire.engine.ranks.results import N_ENDS, ResultReader
from quire.engine.ranks.ring import IDLE, READY, RankMemory, RingWriter, Standing, make_memory
from quire.engine.ranks.start import RankStart
from quire.engine.ranks.starting import Member, StartWatch, names_of
from quire.engine.ranks.wire import Said, Stop, encode

logger = logging.getLogger("quire.engine")

WATCH_S: Final = 0.1
MAX_SLEEP_S: Final = 1.0
"""When the watch itself slept longer, this process was stopped or starved, and the ranks' silence means nothing."""
REASON_S: Final = 2.0
"""After rank 0 has failed at something that ranks do together: so long another one may take to be seen as its cause."""
LEAVE_S: Final = 3.0
"""The ranks may take so long to hear that they are to leave, and to leave."""
ROOT_S: Final = 0.5
"""A rank that is killed may be seen after one that failed because its connection closed: so long it is waited for."""
HANG_S: Final = 10.0
"""Rank 0, which leaves its groups with them, may take so long; then they are ended, and what it waits for."""


def _root(ranks: Sequence[Member], poll: select.poll, said: list[tuple[int, int]]) -> RanksLost:
    """Why the first rank is gone, or the one for want of which it has failed. poll: of the pipes of all."""
    losses: list[RanksLost] = []
    end_s = time.monotonic() + ROOT_S
    while said:
        for rank in [rank for rank in ranks if any(fd == rank.status_fd for fd, _ in said)]:
            poll.unregister(rank.status_fd)
            loss, may_be_another = rank.loss()
            losses.append(loss)
            if not may_be_another:
                return loss
        left_s = 0.0 if len(losses) == len(ranks) else end_s - time.monotonic()
        said = poll.poll(max(0.0, left_s) * 1000)
    return losses[0]


class RankGroup:
    """See the module. `start`, then `say` as often as there is something to do, at last `stop`."""

    def __init__(
        self,
        config: EngineConfig,
        shape: Mesh,
        folder: pathlib.Path,
        *,
        is_server: bool = False,
        place: pathlib.Path | None = None,
    ) -> None:
        """folder: the checkpoint. place: for the folder in which all meet, None: the usual one. Starts nothing."""
        self._config, self._shape, self._folder, self._is_server = config, shape, folder, is_server
        self._nodes = Nodes(config, shape, folder, is_server=is_server) if config.nnodes > 1 else None
        self._place = OwnedFolder("quire-ranks-", place)
        self.meeting_point = str(self._place.path / "meet") if self._nodes is None else self._nodes.meeting_point
        """For the `Comm` of every rank, see `core/meeting`."""
        self.has_served = False
        """Its engine was made: when it ends, and is not lost, other nodes end, too."""
        self.calls: Calls | None = None
        self.done: DoneSteps | None = None
        """Of rank 0."""
        self._judge, self._n_said = Judge(shape, config.engine_stall_timeout), 0
        """Steps that the others were told of."""
        self.results: list[ResultReader] = []
        """Once it is started: what the other telling ranks say of steps, in their order."""
        self.loss: RanksLost | None = None
        """Why there are no ranks any more."""
        self.on_loss: Callable[[RanksLost], None] | None = None
        """Told of it by the thread that watches, once all ranks are ended; says it to people."""
        self.abandon: Callable[[], None] = lambda: None
        """Ends what rank 0 has begun with the others, and waits for; called once all ranks are ended."""
        self.is_late = False
        self.on_late: Callable[[], None] | None = None
        self._ranks: list[Member] = []
        self._writer: RingWriter | None = None
        self._fds: list[int] = []
        self._lock, self._loss_lock = threading.Lock(), threading.Lock()
        """Of the writer and what it needs, held while the ring is full; of `loss`, which ends that."""
        self._end_s, self._is_dismissed = math.inf, False
        """When an end no longer waits for room in the ring, or for those that were told to leave."""
        self._started, self._lost = threading.Event(), threading.Event()
        self._stopping, self._left = threading.Event(), threading.Event()
        """The ranks are to leave; rank 0 has left."""
        self._thread: threading.Thread | None = None

    @property
    def pids(self) -> list[int]:
        """Of the processes, from rank 1 on."""
        return [rank.pid for rank in self._ranks]

    def start(self) -> bool:
        """Start the processes, and wait until they are ready to meet this one; False if that was done. Raises
        RanksLost."""
        if self._thread is not None:
            return False
        # The system ends them when the thread ends that has started them: it is to live as long as this process.
        self._thread = threading.Thread(target=self._live, daemon=True, name="quire-ranks")
        self._thread.start()
        self._started.wait()
        while any(rank.standing().state < READY for rank in self._ranks):
            if self._lost.wait(WATCH_S):
                break
        self.check()
        return True

    def say(self, said: Said) -> None:
        """Have every other rank do it, as soon as it has done what was said before. Raises RanksLost."""
        data = encode(said)
        with self._lock:
            self.check()
            if self._writer is not None:
                if self._nodes is not None:  # they have a longer way
                    self._nodes.say(data)
                self._writer.put(data)
                self._n_said += isinstance(said, StepPlan)

    def allow_steps(self, step_s: float) -> None:
        """The longest that a host may be at a step in which no other rank takes part."""
        self._judge.step_s = step_s

    def check(self) -> None:
        """Raises RanksLost once that is so."""
        if self.loss is not None:
            raise self.loss

    def ends_within(self, seconds: float) -> bool:
        """Whether the ranks are about to be ended; waits so long for it. Raises RanksLost once they are lost."""
        self.check()
        return self._stopping.wait(seconds)

    def _check_ring(self) -> None:
        """Raises RanksLost once nobody will make room in a full ring."""
        self.check()
        if time.monotonic() > self._end_s:
            raise RanksLost("the ranks are ended, and do not read what they are told", EndKind.STALL)

    def beside(self, work: Callable[[], None]) -> None:
        """Do it in a thread, which is left behind as soon as a rank is lost: nobody can end a wait for one that has not
        come yet. Raises RanksLost, and what it raises."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, daemon=True, name="quire-meeting").start()
        while not future.done():
            concurrent.futures.wait((future,), WATCH_S)
            self.check()
        future.result()

    def cause(self, error: Exception) -> RanksLost:
        """Rank 0 has failed at something that all ranks do: what to raise, which is a lost rank if that is the reason.
        In any case no rank can go on."""
        own = RanksLost(f"rank 0 failed ({type(error).__name__}: {error})", EndKind.CRASH)
        if not self._lost.wait(REASON_S):
            self._lose(own, [])
        return self.loss or own

    def wait_ended(self) -> None:
        """See `OtherRanks`."""
        self._lost.wait(HANG_S)

    def dismiss(self) -> bool:
        """Tell the processes to leave, and wait for nothing; False if they do not hear it. Unless `stop` follows within
        `HANG_S`, they are lost."""
        if self._stopping.is_set() or self._writer is None or self.loss is not None:
            return False
        self._stopping.set()
        self._end_s = time.monotonic() + LEAVE_S
        try:
            self.say(Stop())
        except RanksLost:
            return False
        self._is_dismissed = True
        return True

    def stop(self) -> None:
        """End the processes: those that were told to leave have time for it (idempotent)."""
        self._stopping.set()
        self._left.set()
        if self._is_dismissed:
            for rank in self._ranks:
                rank.wait(max(0.0, self._end_s - time.monotonic()))
        self._end_s = 0.0
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(HANG_S)  # `abandon` may hang, too
        if self._nodes is not None and self.loss is None:
            if self.has_served:
                self._nodes.dismiss()
            else:
                self._nodes.tell_loss("it has ended before it served; its own log says why")
        self._free()

    def _free(self) -> None:
        if self._nodes is not None:  # before the lock: who has it may wait in a connection
            self._nodes.close()
        with self._lock:
            ranks, self._ranks = self._ranks, []
            for rank in ranks:
                rank.end()
            fds, self._fds = self._fds, []
            for fd in fds:
                os.close(fd)
            self._writer = None
        self._place.remove()

    def _live(self) -> None:
        """The thread."""
        try:
            self._start_all()
        except OSError as error:
            reason = shortage(error) or str(error)
            self._lose(RanksLost(f"a process for a rank could not be started: {reason}", EndKind.FAILED), [])
        except RanksLost as loss:
            self._lose(loss, [])
        finally:
            self._started.set()
        try:
            self._watch()
            self._see_off()
        except RuntimeError as error:  # a device that has failed says so to whoever asks for its marks
            self._lose(RanksLost(f"rank 0 failed ({type(error).__name__}: {error})", EndKind.CRASH), [])

    def _start_all(self) -> None:
        n_ranks = self._shape.n_ranks
        fd = make_memory(n_ranks)
        self._fds.append(fd)
        own = ranks_of_node(self._config, n_ranks, 0)[1:]
        bells = [os.eventfd(0) for _ in own]
        self._fds += bells
        memory = RankMemory(fd, n_ranks)
        self._writer = RingWriter(memory, bells, self._check_ring)
        for number, bell in zip(own, bells, strict=True):
            reading, writing = os.pipe()
            results = self._open_results() if number in self._shape.telling_ranks else (-1, -1)
            start = RankStart(
                number, self._shape, self._config, str(self._folder), self.meeting_point, fd, bell, writing,
                self._is_server, *results,
            )  # fmt: skip
            # A rank that is stopped before it has its death signal outlives this process, but not the engine's process
            # group, which a server's end kills. One of a script may get signals of its terminal.
            self._ranks.append(LocalRank(start, reading, memory, in_own_session=not self._is_server))
        if self._nodes is not None:
            self._start_others(self._nodes)

    def _start_others(self, nodes: Nodes) -> None:
        """Those of other nodes. RanksLost: they cannot be started."""
        for number in self._shape.telling_ranks:
            if number not in ranks_of_node(self._config, self._shape.n_ranks, 0):
                fd, bell = self._open_results()
                nodes.results[number] = RingWriter(RankMemory(fd, N_ENDS), [bell], self.check)
        self._ranks += nodes.start(self._stopping.is_set)

    def _open_results(self) -> tuple[int, int]:
        """Memory and bell for what a rank says of steps."""
        results = make_memory(N_ENDS), os.eventfd(0)
        self._fds.append(results[0])
        self.results.append(ResultReader(*results, self.check))
        return results

    def _watch(self) -> None:
        poll = select.poll()
        for rank in self._ranks:
            poll.register(rank.status_fd, select.POLLIN)
        last_s = time.monotonic()
        start_watch = StartWatch(last_s)
        while not self._stopping.is_set() and self.loss is None:
            said = poll.poll(WATCH_S * 1000)
            slept_s, last_s = time.monotonic() - last_s, time.monotonic()
            if self._stopping.is_set():
                return
            if said:
                self._lose(_root(self._ranks, poll, said), [])
                return
            if slept_s > MAX_SLEEP_S:
                self._judge.pardon()
                if self._nodes is not None:
                    self._nodes.pardon()
                continue
            start_watch.look(self._ranks, last_s)
            self._look()

    def _see_off(self) -> None:
        """Ranks were told to leave: none of them hangs for longer than `HANG_S`, rank 0 neither."""
        if self.loss is None and not self._left.wait(HANG_S):
            there = [rank for rank in self._ranks if rank.wait(0.0) is None]
            names = ", ".join(rank.name for rank in there) or "rank 0"
            self._lose(RanksLost(f"{names} did not leave the groups of ranks in {HANG_S:g} s", EndKind.STALL), there)

    def _look(self) -> None:
        """Whether any rank is late, or all wait for a device."""
        standings, now_s = self._standings(), time.monotonic()
        late_s = self._judge.late_s(standings, now_s)
        self.is_late = any(seconds > LATE_S for seconds in late_s.values())
        limit_s = min(LOST_S, self._config.engine_stall_timeout or LOST_S)
        lost = [rank for rank in self._ranks if late_s[rank.number] > limit_s]
        silent = "" if self._nodes is None else self._nodes.silent(LATE_S if lost else limit_s)
        if silent:
            why = f"{silent} said nothing for {limit_s:g} s: its machine or the network is down, or its process stopped"
            self._lose(RanksLost(why, EndKind.KILLED), [])  # from outside: no request is to blame for it alone
            return
        if lost:
            why = f"{names_of(lost)} made no progress for {limit_s:g} s and was ended"
            self._lose(RanksLost(why, EndKind.STALL), lost)
            return
        stuck = self._judge.stuck(standings, self._n_said, now_s)
        if stuck:
            names = ", ".join(map(str, stuck))
            limit_s = self._judge.stuck_s
            message = f"a step that was launched for {limit_s:g} s has not ended on the devices of ranks {names}"
            self._lose(RanksLost(message, EndKind.STALL), [rank for rank in self._ranks if rank.number in stuck])

    def _standings(self) -> list[Standing]:
        """From rank 0 on."""
        n_calls, n_done = 0 if self.calls is None else self.calls.n_calls, 0 if self.done is None else self.done.count()
        return [Standing(IDLE, 0.0, n_calls, n_done)] + [rank.standing() for rank in self._ranks]

    def _lose(self, loss: RanksLost, with_stacks: Sequence[Member]) -> None:
        with self._loss_lock:
            if self.loss is not None or self._left.is_set():
                return
            self.loss = loss
        if with_stacks or self.on_loss is None:  # else the server's process says the same, at once
            logger.error("%s; all ranks are ended", loss.message)
        for rank in with_stacks:
            rank.show_stacks()
        if self._nodes is not None:
            self._nodes.tell_loss(loss.message)
        self._free()
        self._lost.set()
        if self.on_loss is not None:
            self.on_loss(loss)
        self.abandon()
