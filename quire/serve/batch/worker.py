"""Runs batches in what interactive requests leave of the engine. One worker a data folder, whoever holds its lock.

Owns how many lines run at once, trials of suspects, and its own life. Does not own records, whose turn it is
(`queue.py`), nor what comes of a line (`attempt.py`) and of a batch (`end.py`). Invariants: a line is
marked in the store before it runs; a suspect runs while no other line does; a batch goes on after a restart where it
was; an owner's trouble keeps only the owner waiting.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Iterable

from quire.serve.batch.attempt import DISK_RETRY_S, MAX_TRIES, Attempts, Pauses
from quire.serve.batch.end import BatchEnd
from quire.serve.batch.locks import FileLock
from quire.serve.batch.queue import Line
from quire.serve.batch.runner import LineRunner
from quire.serve.batch.store import LOCK, BatchStore, StoreDamaged, StoreThread, is_disk_trouble
from quire.serve.http.loopback import Run
from quire.serve.state import ServerState

logger = logging.getLogger("quire.batch")

POLL_S = 1.0
"""How often another process's news are looked for."""
ROOM_POLL_S = 0.02
SWEEP_S = 3600.0
RESERVE = 8
"""One slot in this many stays free of batch lines, so that a new request finds one."""
MAX_RUNNING_BYTES = 32 << 20
"""Of all lines that run. One line alone may have more."""
MAX_SCANS = 2
MAX_ENDS = 4
GUILTY_DEATHS = 3
"""Deaths while a line ran alone after which it runs no more. Some may have had another cause: a kill from outside."""
TRIAL_PAUSE_S = 15.0
"""Time from the start to a trial, for each death of the line: a server that dies is not to die all the time, and a
parent gives a process up that ends again and again within seconds of its start (`api_processes.py`)."""


class BatchWorker:
    """Start it with `run` in a task; cancelling the task leaves every batch as it is."""

    def __init__(self, state: ServerState, run: Run, store: StoreThread) -> None:
        self._state = state
        self._store = store
        self._runner = LineRunner(state, run, store)
        self._attempts = Attempts(store, self._runner, state.config.max_body_bytes, lambda: state.llm.healthy())
        self._stored = self._attempts.stored
        self._lock: FileLock | None = None
        self._running: dict[asyncio.Task[None], Line] = {}
        """Lines, and readings of inputs."""
        self._ends: dict[str, asyncio.Task[None]] = {}
        """Owners of whom a batch is being taken to its end."""
        self._end_pauses = Pauses()
        """Of batches whose end went wrong."""
        self._end_tries: collections.Counter[str] = collections.Counter()
        self._fault: BaseException | None = None
        """What a task has raised in spite of its own handling."""
        self._line_turn = self._input_turn = self._end_turn = ""
        """Owners who had the last turn."""
        self._may_have_lines = self._may_have_suspects = True
        self._started_s = self._next_trial_s = self._next_look_s = self._next_sweep_s = 0.0

    async def run(self) -> None:
        """Work until cancelled. Raises what no line or batch can answer for: run it again then."""
        is_first = self._lock is None
        try:
            while not await self._store.aside(self._try_lock):
                await asyncio.sleep(POLL_S * 5)
            try:
                await self._work(after_death=is_first)
            finally:
                await _cancelled([*self._running, *self._ends.values()])
        except StoreDamaged:
            logger.error("batches stop until the server is started again")
        except asyncio.CancelledError:
            if self._lock is not None:
                self._lock.release()
            raise

    async def _work(self, *, after_death: bool) -> None:
        self._started_s = self._now_s()
        n_accused = await self._stored(lambda disk: disk.lines.accuse() if after_death else disk.lines.release())
        self._store.at_close = self._release_marks  # from now on marks are this process's own
        if n_accused:
            logger.warning("%d lines of batches ran when a process died: they run one at a time now", n_accused)
        await self._stored(lambda disk: disk.heal())
        while convicts := await self._stored(lambda disk: disk.lines.convicts(GUILTY_DEATHS)):
            for line in convicts:
                await self._attempts.convict(line)
        while True:
            self._state.batch_news.clear()
            wait_s = await self._turn()
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._state.batch_news.wait()

    async def _turn(self) -> float:
        """Begin what can be begun; seconds after which there may be more."""
        if self._state.draining:
            await _cancelled(list(self._running))
            await self._stored(self._release_marks)
            return POLL_S
        if self._now_s() >= self._next_sweep_s:
            await self._sweep()
        if self._attempts.has_ended or self._now_s() >= self._next_look_s:
            await self._look()
        pause_s = self._attempts.all_until_s - self._now_s()
        if pause_s > 0:
            return min(POLL_S, pause_s)
        if any(line.is_on_trial for line in self._running.values()) or await self._try_suspect():
            return POLL_S
        await self._begin_scans()
        return await self._begin_lines()

    # ---- lines

    async def _try_suspect(self) -> bool:
        """Begin a trial if one is due; True if no other line may begin."""
        if not self._may_have_suspects or self._now_s() < self._next_trial_s:
            return False
        paused = self._attempts.owners.all()
        line = await self._stored(lambda disk: disk.lines.suspect(paused))
        if line is None:
            self._may_have_suspects, self._next_trial_s = bool(paused), self._now_s() + POLL_S
            return False
        due_s = self._started_s + TRIAL_PAUSE_S * line.deaths
        if self._now_s() < due_s:
            self._next_trial_s = due_s
            return False
        if not self._running:
            found = line
            self._start(await self._stored(lambda disk: disk.lines.begin_trial(found)))
        return True

    async def _begin_scans(self) -> None:
        while len(scans := [line for line in self._running.values() if line.is_whole_input]) < MAX_SCANS:
            busy, after = self._attempts.owners.all() | {line.owner for line in scans}, self._input_turn
            line = await self._stored(lambda disk: disk.lines.take_input(busy, after))  # noqa: B023
            if line is None:
                return
            self._input_turn = line.owner
            self._start(line)

    async def _begin_lines(self) -> float:
        lines = [line for line in self._running.values() if not line.is_whole_input]
        n_free = self._n_free(len(lines))
        n_taken = 0
        if n_free:
            counts = collections.Counter(line.owner for line in lines)
            n_bytes = MAX_RUNNING_BYTES - sum(line.length for line in lines)
            paused, after = self._attempts.owners.all(), self._line_turn
            taken, self._may_have_lines = await self._stored(
                lambda disk: disk.lines.take_lines(n_free, n_bytes, counts, paused, after)
            )
            n_taken = len(taken)
            for line in taken:
                self._line_turn = line.owner
                self._start(line)
        # Room that others may give is looked for often; of what lines of batches hold, their ends tell.
        waits_for_others = n_taken == n_free and len(lines) + n_taken < self._state.config.batch_concurrency
        return ROOM_POLL_S if self._may_have_lines and waits_for_others else POLL_S

    def _start(self, line: Line) -> None:
        task = asyncio.create_task(self._attempts.run(line))
        self._running[task] = line
        began_s = self._now_s()

        def done(task: asyncio.Task[None]) -> None:
            del self._running[task]
            self._may_have_lines |= line.is_whole_input
            if line.is_on_trial:  # the others run for as long as it took, before the next one
                self._next_trial_s = 2 * self._now_s() - began_s
            self._heed(task)

        task.add_done_callback(done)

    # ---- batches

    async def _look(self) -> None:
        """Batches that come to their end."""
        self._attempts.has_ended, self._next_look_s = False, self._now_s() + POLL_S

        def look(disk: BatchStore) -> list[tuple[str, str, str, str]]:
            disk.begin_expired()
            return disk.endings()

        found = await self._stored(look)
        for owner, batch_id, ending, input_file_id in sorted(found, key=lambda row: (row[0] <= self._end_turn, row[0])):
            if len(self._ends) < MAX_ENDS and owner not in self._ends and not self._end_pauses.left_s(batch_id):
                self._end_turn = owner
                end = BatchEnd(self._store, self._runner, owner, batch_id, input_file_id)
                self._ends[owner] = asyncio.create_task(self._end(end, ending))
                self._ends[owner].add_done_callback(lambda task, owner=owner: self._ended(owner, task))  # type: ignore[misc]

    def _ended(self, owner: str, task: asyncio.Task[None]) -> None:
        del self._ends[owner]
        self._next_look_s = 0.0
        self._heed(task)

    async def _end(self, end: BatchEnd, ending: str) -> None:
        await _cancelled([task for task, line in self._running.items() if line.batch_id == end.batch_id])
        try:
            if self._end_tries[end.batch_id] < MAX_TRIES:
                await end.reach(ending)
            else:
                await end.give_up("internal_error", "The server failed while it wrote the outputs of this batch.")
            del self._end_tries[end.batch_id]
        except StoreDamaged:
            raise
        except Exception as error:
            self._end_pauses.hold(end.batch_id, DISK_RETRY_S)
            if is_disk_trouble(error):
                logger.warning("the data folder refuses, the end of batch %s waits: %s", end.batch_id, error)
            else:
                logger.exception("taking batch %s to its end failed", end.batch_id)
                self._end_tries[end.batch_id] += 1

    async def _sweep(self) -> None:
        """Remove what processes that died have left behind."""
        self._next_sweep_s = self._now_s() + SWEEP_S
        try:
            found = await self._store.aside(lambda: list(self._store.store.content_names()))
        except OSError as error:
            logger.warning("the folder of contents cannot be read: %s", error)
            return
        await self._stored(lambda disk: disk.space.forget_dead())
        for names in found:
            await self._stored(lambda disk, names=names: disk.unknown(names))  # type: ignore[misc]

    # ---- the rest

    def _heed(self, task: asyncio.Task[None]) -> None:
        """A task has ended: see whether in order, and go on."""
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
        self._state.batch_news.set()

    def _release_marks(self, disk: BatchStore) -> None:
        """This process ends in order: what runs is not to blame, unless the engine is lost."""
        if self._state.llm.healthy():
            disk.lines.release()

    def _n_free(self, n_running: int) -> int:
        """How many lines more take nothing from others: slots are free beyond the reserve, and nobody waits."""
        llm = self._state.llm
        n_slots, n_taken = llm.ready.max_num_seqs, max(llm.n_open, n_running)
        n_free = 0 if llm.stats().n_waiting else n_slots - n_slots // RESERVE - n_taken
        if not n_taken:
            n_free = max(n_free, 1)
        return max(0, min(n_free, self._state.config.batch_concurrency - n_running))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _try_lock(self) -> bool:
        """Become the one worker of the folder; the lock goes when this process does, however it ends."""
        if self._lock is None:
            try:
                self._lock = FileLock.take(self._store.store.folder / LOCK)
            except OSError as error:
                logger.warning("no batches are run: worker.lock in the data folder cannot be locked: %s", error)
        return self._lock is not None


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
