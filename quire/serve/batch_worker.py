"""Runs batches in what interactive requests leave of the engine. One worker a data folder, whoever holds its lock.

Owns the order of lines, how many run at once, and the way of a batch to its end. Does not own records
nor answering (`loopback.py`). Invariants: a line's output is stored before it counts; a batch goes on after a restart
where it was; a line that the server had no room for is tried again; a full disk delays a batch and ends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import itertools
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from typing import IO, TypeVar

from quire.serve.batch_lines import BatchLine, answered, custom_id_of, failed, read_line
from quire.serve.batch_store import BatchRecord, BatchStore, StoreThread
from quire.serve.loopback import Reply, Run, ask
from quire.serve.refusal import Refusal
from quire.serve.state import ServerState

logger = logging.getLogger("quire.batch")

T = TypeVar("T")

MAX_LINES = 100_000
POLL_S = 1.0
"""How often another process's news are looked for."""
ROOM_POLL_S = 0.02
RETRY_S = 0.5
DISK_RETRY_S = 5.0
RESERVE = 8
"""One slot in this many stays free of batch lines, so that a new request finds one."""
READ_LINES = 64
FILL_LINES = 512
EXPIRED = "This request could not be executed before the completion window expired."


class BatchWorker:
    """Start it with `run` in a task; cancelling the task leaves every batch as it is."""

    def __init__(self, state: ServerState, run: Run, store: StoreThread) -> None:
        self._state = state
        self._run = run
        self._store = store
        self._lock: IO[bytes] | None = None

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while not await asyncio.to_thread(self._take_lock):
                await asyncio.sleep(POLL_S * 5)
            await self._stored(lambda disk: disk.sweep())
            while True:
                batches = await self._stored(lambda disk: disk.open_batches())
                if not batches or self._state.draining:
                    await self._wait_for_news()
                elif not await self._advance(_BatchJob(*batches[0])):
                    await asyncio.sleep(RETRY_S)
        finally:
            if self._lock is not None:
                self._lock.close()

    async def _advance(self, job: _BatchJob) -> bool:
        """Take a batch to its end; False if it has to be gone on with later."""
        batch = job.batch
        if batch.status == "validating" and not await self._begin(job):
            return True
        end = "cancelled" if batch.status == "cancelling" else "completed"
        if batch.status == "in_progress":
            watcher = asyncio.create_task(self._watch(job))
            try:
                await self._run_lines(job)
            finally:
                watcher.cancel()
            if job.must_wait:
                return False
            end = job.end
        if end == "expired":
            await self._fill_in(job, "batch_expired", EXPIRED)
        await self._finish(job, end)
        return True

    async def _begin(self, job: _BatchJob) -> bool:
        """Count the lines; False if the batch has failed or was cancelled."""
        batch = job.batch
        path = self._store.store.content_path(batch.input_file_id)
        try:
            n_lines = await asyncio.to_thread(_count_lines, path)
        except FileNotFoundError:
            return await self._fail(job, "The input file is gone.")
        if not 0 < n_lines <= MAX_LINES:
            return await self._fail(job, f"The input has {n_lines} lines: it must have 1 to {MAX_LINES}.")
        batch.request_counts.total = n_lines
        batch.status, batch.in_progress_at = "in_progress", int(time.time())
        return await self._save(job)

    async def _fail(self, job: _BatchJob, message: str) -> bool:
        batch = job.batch
        batch.status, batch.failed_at = "failed", int(time.time())
        problem = {"code": "invalid_input", "message": message, "param": "input_file_id", "line": None}
        batch.errors = {"object": "list", "data": [problem]}
        await self._save(job)
        return False

    async def _run_lines(self, job: _BatchJob) -> None:
        """Every line that has no output yet, as many at once as there is room for."""
        batch = job.batch
        done = await self._stored(lambda disk: disk.done_lines(batch.id))
        running: set[asyncio.Task[None]] = set()
        seen: set[str] = set()
        try:
            async for number, data in _lines(self._store.store.content_path(batch.input_file_id).open("rb")):
                name = custom_id_of(data, self._state.config.max_body_bytes)
                is_double = name is not None and name in seen
                if name is not None:
                    seen.add(name)
                if number in done:
                    continue
                while not job.stopped and not self._has_room(len(running)):
                    await asyncio.sleep(ROOM_POLL_S)
                if job.stopped:
                    break
                task = asyncio.create_task(self._line(job, number, data, is_double))
                running.add(task)
                task.add_done_callback(running.discard)
            while running and not job.stopped:
                await asyncio.wait(running, timeout=POLL_S)
            if not job.stopped and await self._fill_in(job, "internal_error", "The server failed at this line."):
                logger.error("lines of %s came to no end", batch.id)  # a bug of ours must not lose one
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _fill_in(self, job: _BatchJob, code: str, message: str) -> int:
        """An error for every line that has no output; how many there were."""
        batch_id = job.batch.id
        done = await self._stored(lambda disk: disk.done_lines(batch_id))
        if len(done) == job.batch.request_counts.total:
            return 0
        left: list[tuple[int, bytes]] = []
        n_left = 0

        def keep(disk: BatchStore) -> None:
            for number, output in left:
                disk.add_result(batch_id, number, output, is_error=True)

        async for number, data in _lines(self._store.store.content_path(job.batch.input_file_id).open("rb")):
            if number not in done:
                left.append((number, failed(custom_id_of(data, self._state.config.max_body_bytes), code, message)))
                n_left += 1
            if len(left) >= FILL_LINES:
                await self._stored(keep)
                left.clear()
        await self._stored(keep)
        return n_left

    async def _line(self, job: _BatchJob, number: int, data: bytes, is_double: bool) -> None:
        """One line to its output."""
        try:
            line = read_line(data, self._state.config.max_body_bytes, job.batch.endpoint)
        except Refusal as refusal:
            name = custom_id_of(data, self._state.config.max_body_bytes)
            await self._keep(job, number, failed(name, refusal.code, refusal.message), is_error=True)
            return
        if is_double:
            output = failed(line.custom_id, "duplicate_custom_id", "An earlier line has this custom_id.")
            await self._keep(job, number, output, is_error=True)
            return
        reply = await self._ask(job.owner, line)
        if reply is None:
            output = failed(
                line.custom_id, "invalid_api_key", "The API key that made this batch is not known any more."
            )
            await self._keep(job, number, output, is_error=True)
        else:
            await self._keep(job, number, answered(line.custom_id, reply), is_error=reply.status != 200)

    async def _ask(self, owner: str, line: BatchLine) -> Reply | None:
        """The answer, asked for again while the server has no room; None if the owner's key is gone."""
        while True:
            tenant = self._state.keys.named(owner)
            reply = None if tenant is None else await ask(self._run, line.url, line.body, tenant)
            if reply is None or not reply.is_busy:
                return reply
            await asyncio.sleep(RETRY_S)

    async def _keep(self, job: _BatchJob, number: int, output: bytes, *, is_error: bool) -> None:
        batch_id = job.batch.id
        await self._stored(lambda disk: disk.add_result(batch_id, number, output, is_error=is_error))

    async def _watch(self, job: _BatchJob) -> None:
        """Publish the counts; notice a cancel, the end of the window and the end of the server."""
        batch = job.batch
        while not job.stopped:
            await self._wait_for_news()
            known = await self._stored(lambda disk: disk.batch(job.owner, batch.id))
            job.must_wait = self._state.draining
            if known is None or known.status == "cancelling":
                job.end = "cancelled"
            elif time.time() >= batch.expires_at:
                job.end = "expired"
            elif not job.must_wait:
                await self._count(job)

    async def _count(self, job: _BatchJob) -> None:
        batch = job.batch

        def save(disk: BatchStore) -> None:
            counts = batch.request_counts
            counts.completed, counts.failed = disk.counts(batch.id)
            known = disk.batch(job.owner, batch.id)
            if known is not None and known.status == batch.status:
                disk.save_batch(batch)

        await self._stored(save)

    async def _finish(self, job: _BatchJob, end: str) -> None:
        """Outputs into files, and the record to its end."""
        batch = job.batch

        def finish(disk: BatchStore) -> None:
            known = disk.batch(job.owner, batch.id)
            now_s = int(time.time())
            if known is not None:
                batch.cancelling_at = known.cancelling_at
            counts = batch.request_counts
            counts.completed, counts.failed = disk.counts(batch.id)
            batch.finalizing_at = now_s
            batch.output_file_id = disk.write_results(job.owner, batch.id, False, f"{batch.id}_output.jsonl")
            batch.error_file_id = disk.write_results(job.owner, batch.id, True, f"{batch.id}_error.jsonl")
            batch.status = end
            setattr(batch, f"{end}_at", now_s)
            disk.save_batch(batch)
            disk.drop_results(batch.id)

        await self._stored(finish)
        logger.info("batch %s is %s", batch.id, end)

    async def _save(self, job: _BatchJob) -> bool:
        """Record the batch unless it was cancelled meanwhile; False then."""
        batch = job.batch

        def save(disk: BatchStore) -> bool:
            known = disk.batch(job.owner, batch.id)
            if known is None or known.status == "cancelling":
                return False
            disk.save_batch(batch)
            return True

        return await self._stored(save)

    async def _stored(self, work: Callable[[BatchStore], T]) -> T:
        """Result of `work`, tried again for as long as the disk refuses."""
        while True:
            try:
                return await self._store.run(work)
            except (sqlite3.Error, OSError) as error:
                logger.warning("the data folder refuses, batches wait: %s", error)
                await asyncio.sleep(DISK_RETRY_S)

    def _has_room(self, n_running: int) -> bool:
        """Whether one more line takes nothing from others: slots are free beyond the reserve, and nobody waits."""
        if n_running >= self._state.config.batch_concurrency:
            return False
        llm = self._state.llm
        n_slots, n_taken = llm.ready.max_num_seqs, max(llm.n_open, n_running)
        return not n_taken or (n_taken < n_slots - n_slots // RESERVE and not llm.stats().n_waiting)

    async def _wait_for_news(self) -> None:
        news = self._state.batch_news
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await news.wait()
        news.clear()

    def _take_lock(self) -> bool:
        """Become the one worker of the folder; the lock goes when this process does, however it ends."""
        lock = (self._store.store.folder / "worker.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._lock = lock
        return True


@dataclasses.dataclass(slots=True)
class _BatchJob:
    """A batch under way."""

    owner: str
    batch: BatchRecord
    end: str = "completed"
    must_wait: bool = False
    """The server shuts down: the batch goes on after the next start."""

    @property
    def stopped(self) -> bool:
        return self.must_wait or self.end != "completed"


def _count_lines(path: os.PathLike[str]) -> int:
    with open(path, "rb") as content:
        return sum(1 for line in content if line.strip())


async def _lines(content: IO[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """(number from 0, bytes) of every line that is not blank."""

    def some() -> list[bytes]:
        return list(itertools.islice(content, READ_LINES))

    with content:
        number = 0
        while lines := await asyncio.to_thread(some):
            for line in lines:
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
                    number += 1
