"""Files and batches on disk: records in SQLite, contents beside it. Owns the folder; does not own what batches do.

Synchronous: `StoreThread` runs it. Names on disk are ours alone, never a client's. What belongs together is one
transaction, so that nothing comes between a look and the change that follows from it.
Invariants: a record exists only once its content is complete; an open batch has its input file; a content without a
record is nobody's; after a crash whatever was recorded is still there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import pathlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from quire.core.errors import ConfigError
from quire.core.files import check_regular
from quire.serve.batch.outputs import Outputs
from quire.serve.batch.queue import LineQueue
from quire.serve.batch.schema import (
    OPEN_STATUSES,
    VERSION,
    BatchRecord,
    Counts,
    FileRecord,
    decoded,
    prepare,
    problem,
)
from quire.serve.batch.space import Space, SpaceLimits

logger = logging.getLogger("quire.batch")

T = TypeVar("T")

DATABASE = "quire.sqlite3"
LOCK = "worker.lock"
"""Held by the one process that works on batches."""
SWEEP_NAMES = 500
DISK_TROUBLE = frozenset(
    {
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL,
    }
)  # fmt: skip
"""What may be over after a while."""
DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class StoreDamaged(Exception):
    """The database cannot be read any more: waiting does not help."""


class FileInUse(Exception):
    """An open batch needs this file."""


def is_disk_trouble(error: BaseException) -> bool:
    """True if the disk refuses and the same may succeed later."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_FULL)
        return code & 0xFF in DISK_TROUBLE
    return isinstance(error, OSError)


def _is_damage(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE


class BatchStore:
    """One folder. Raises sqlite3.Error or OSError when the disk refuses, StoreDamaged, StorageFull."""

    def __init__(self, folder: pathlib.Path, limits: SpaceLimits | None = None) -> None:
        """ConfigError if the folder cannot be used."""
        self.folder = folder
        self._contents = folder / "files"
        try:
            self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_regular(folder / DATABASE)
            self._database = sqlite3.connect(
                folder / DATABASE, timeout=10, isolation_level=None, check_same_thread=False
            )
            version = prepare(self._database)
        except (OSError, sqlite3.Error) as error:
            advice = ": restore it, or move it away and start again" if _is_damage(error) else ""
            raise ConfigError(f"data_dir = {str(folder)!r} cannot be used: {DATABASE}: {error}{advice}") from None
        if version != VERSION:
            self._database.close()
            raise ConfigError(f"data_dir = {str(folder)!r} was written by another version of Quire ({version})")
        self.space = Space(self._database, folder, limits or SpaceLimits())
        self.lines = LineQueue(self._database, self.space)
        self.outputs = Outputs(self._database, self.space)
        self.is_damaged = False

    def close(self) -> None:
        """Let go of the database."""
        self.space.close()
        self._database.close()

    def transact(self, work: Callable[[BatchStore], T]) -> T:
        """Result of `work`, whose changes are made all or none, and not amid those of another process."""
        try:
            return self._transact(work)
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
            if not self.is_damaged:
                self.is_damaged = True
                logger.error(
                    "%s is damaged (%s): files and batches are out of order until it is restored or moved away and the"
                    " server started again; everything else is served", self.folder / DATABASE, error,
                )  # fmt: skip
            raise StoreDamaged from None

    def _transact(self, work: Callable[[BatchStore], T]) -> T:
        gone = self.space.gone
        if self._database.in_transaction:  # neither commit nor rollback was possible the last time
            self._database.execute("rollback")
        self._database.execute("begin immediate")
        is_done = False
        try:
            result = work(self)
            self._database.execute("commit")
            is_done = True
        finally:
            if not is_done:
                gone.clear()
                with contextlib.suppress(sqlite3.Error):  # what made it fail may have rolled it back already
                    if self._database.in_transaction:
                        self._database.execute("rollback")
        while gone:
            self._remove(gone.pop())
        return result

    def unknown(self, names: list[str]) -> None:
        """Remove those contents, of all that lie there, that have no record: of deletions that a crash cut short."""
        for name in names:
            query = "select 1 from files where id = ?1 union all select 1 from unfinished where id = ?1"
            if self._database.execute(query, (name,)).fetchone() is None:
                self.space.gone.append(name)

    def _remove(self, file_id: str) -> None:
        try:
            self.content_path(file_id).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the content of a deleted file stays until the next start: %s", error)

    # ---- files

    def content_path(self, file_id: str) -> pathlib.Path:
        """Where the content of a file is; `file_id` must be of a record or `fresh_id`."""
        return self._contents / file_id

    def content_names(self) -> Iterator[list[str]]:
        """Names of all contents on the disk, some at a time. OSError when the disk refuses."""
        names: list[str] = []
        for path in self._contents.iterdir():
            names.append(path.name)
            if len(names) >= SWEEP_NAMES:
                yield names
                names = []
        yield names

    def keep_upload(self, owner: str, record: FileRecord) -> bool:
        """Record a file whose content is complete; False if its reservation is gone."""
        return self.space.finish(record.id, record.bytes) and self._add_file(owner, record)

    def _add_file(self, owner: str, record: FileRecord) -> bool:
        row = (record.id, owner, record.purpose, record.filename, record.bytes, record.created_at)
        self._database.execute("insert into files values (?, ?, ?, ?, ?, ?)", row)
        return True

    def file(self, owner: str, file_id: str) -> FileRecord | None:
        """An owner's file by its exact id."""
        return next(self._files("where owner = ? and id = ?", owner, file_id), None)

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int) -> list[FileRecord]:
        """Newest first."""
        clause = "where owner = ?1 and (?2 is null or purpose = ?2)"
        clause += " and (?3 is null or rowid < (select rowid from files where owner = ?1 and id = ?3))"
        return list(self._files(f"{clause} order by rowid desc limit ?4", owner, purpose, after, limit))

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Forget a file and its content; False if there was none. Raises FileInUse."""
        record = self.file(owner, file_id)
        if record is None:
            return False
        statuses = ", ".join(f"'{status}'" for status in OPEN_STATUSES)
        query = f"select 1 from batches where input_file_id = ? and status in ({statuses}) limit 1"
        if self._database.execute(query, (file_id,)).fetchone() is not None:
            raise FileInUse
        self._database.execute("delete from files where id = ?", (file_id,))
        self.space.charge(owner, -record.bytes)
        self.space.gone.append(file_id)
        return True

    def _files(self, clause: str, *values: object) -> Iterator[FileRecord]:
        query = f"select id, purpose, filename, bytes, created_at from files {clause}"
        for file_id, purpose, filename, n_bytes, created_at in self._database.execute(query, values):
            yield FileRecord(id=file_id, purpose=purpose, filename=filename, bytes=n_bytes, created_at=created_at)

    # ---- batches

    def create_batch(self, owner: str, batch: BatchRecord) -> bool:
        """A new batch; False if the owner has no such file for it."""
        file = self.file(owner, batch.input_file_id)
        if file is None or file.purpose != "batch":
            return False
        self._database.execute(
            "insert into batches (id, owner, status, created_at, record, input_file_id, expires_at)"
            " values (?, ?, ?, ?, ?, ?, ?)",
            (
                batch.id, owner, batch.status, batch.created_at, msgspec.json.encode(batch).decode(),
                batch.input_file_id, batch.expires_at,
            ),
        )  # fmt: skip
        self.lines.add_input(batch.id, file.bytes)
        return True

    def batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        """An owner's batch by its exact id."""
        return next(self._batches("where owner = ? and id = ?", owner, batch_id), None)

    def batches(self, owner: str, after: str | None, limit: int) -> list[BatchRecord]:
        """Newest first."""
        clause = "where owner = ?1 and (?2 is null or rowid < (select rowid from batches where owner = ?1 and id = ?2))"
        return list(self._batches(f"{clause} order by rowid desc limit ?3", owner, after, limit))

    def cancel_batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        """Ask for the end of a batch that is not at its end; None if there is no such batch."""
        batch = self.batch(owner, batch_id)
        if batch is not None and batch.status in ("validating", "in_progress"):
            return self.begin_end(batch.id, "cancelled")
        return batch

    def begin_work(self, batch_id: str, n_lines: int) -> bool:
        """The input of a batch was read: it has so many lines. True if they all have their output."""
        self.lines.end_input(batch_id)
        batch = next(self._batches("where id = ? and status = 'validating' and ending is null", batch_id), None)
        if batch is None:
            return False
        batch.status, batch.in_progress_at = "in_progress", int(time.time())
        self._database.execute("update batches set n_total = ? where id = ?", (n_lines, batch_id))
        self._save(batch)
        return self.end_if_done(batch_id)

    def end_if_done(self, batch_id: str) -> bool:
        """Take a batch whose lines have all their output to its end; True if so."""
        return self.lines.is_done(batch_id) and self.begin_end(batch_id, "completed") is not None

    def begin_end(self, batch_id: str, ending: str, code: str = "", message: str = "") -> BatchRecord | None:
        """Take a batch to this end: nothing of it is begun any more. A failure, whose reason is `code` and `message`,
        goes before other ends but a cancel."""
        clause = "where id = ? and (ending is null or (? = 'failed' and ending in ('completed', 'expired')))"
        batch = next(self._batches(clause, batch_id, ending), None)
        if batch is None or batch.status not in OPEN_STATUSES:
            return None
        if ending == "cancelled":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
        else:
            batch.status = "finalizing"
        if code:
            batch.errors = problem(code, message)
        self._database.execute("update batches set ending = ? where id = ?", (ending, batch_id))
        self._save(batch)
        return batch

    def begin_expired(self) -> None:
        """Take batches whose time is over to their end."""
        query = "select id from batches where status = 'in_progress' and ending is null and expires_at <= ?"
        for (batch_id,) in self._database.execute(query, (int(time.time()),)).fetchall():
            self.begin_end(batch_id, "expired")

    def endings(self) -> list[tuple[str, str, str, str]]:
        """(owner, batch id, end, input file) of the oldest batch of each owner that is being taken to its end."""
        columns = "owner, id, ending, input_file_id, min(rowid)"
        rows = self._database.execute(f"select {columns} from batches where ending is not null group by owner")
        return [(owner, batch_id, ending, input_file_id) for owner, batch_id, ending, input_file_id, _ in rows]

    def end_batch(self, owner: str, batch_id: str) -> str:
        """Publish what a batch has; returns the status in which it ends."""
        ending = self._database.execute("select ending from batches where id = ?", (batch_id,)).fetchone()[0]
        batch = next(self._batches("where id = ?", batch_id))
        for record in self.outputs.publish(owner, batch):
            self._add_file(owner, record)
        batch.status, batch.finalizing_at = ending, int(time.time())
        setattr(batch, f"{ending}_at", batch.finalizing_at)
        self._database.execute("update batches set ending = null where id = ?", (batch_id,))
        self._save(batch)
        return batch.status

    def heal(self) -> None:
        """Queue inputs of open batches that have nothing queued, as a bug or a hand in the database may leave them."""
        query = (
            "select id, (select bytes from files f where f.id = input_file_id) from batches b"
            " where ending is null and status in ('validating', 'in_progress')"
            " and not exists (select 1 from lines l where l.batch_id = b.id)"
        )
        for batch_id, n_bytes in self._database.execute(query).fetchall():
            self._database.execute("update batches set status = 'validating' where id = ?", (batch_id,))
            self.lines.add_input(batch_id, n_bytes or 0)

    def _save(self, batch: BatchRecord) -> None:
        row = (batch.status, msgspec.json.encode(batch).decode(), batch.id)
        self._database.execute("update batches set status = ?, record = ? where id = ?", row)

    def _batches(self, clause: str, *values: object) -> Iterator[BatchRecord]:
        query = f"select id, status, created_at, record, n_total, n_completed, n_failed from batches {clause}"
        for *row, total, completed, failed in self._database.execute(query, values):
            batch = decoded(*row)
            batch.status, batch.request_counts = row[1], Counts(total, completed, failed)
            yield batch


class StoreThread:
    """The one thread that talks to the database, so that a slow disk delays no stream."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self.at_close: Callable[[BatchStore], Any] | None = None
        """The last thing that is done to the store when this process ends in order."""
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="quire-store")
        self._litter: set[str] = set()

    async def run(self, work: Callable[[BatchStore], T]) -> T:
        """Result of `work`. Raises what it raises, and sqlite3.Error or OSError when the disk refuses."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.store.transact, work)

    async def aside(self, work: Callable[[], T]) -> T:
        """Result of `work` on contents, in a thread. Raises what it raises."""
        return await asyncio.to_thread(work)

    async def discard(self, *file_ids: str) -> None:
        """Give uploads up that were not completed; what the disk refuses now is tried again with the next."""
        self._litter.update(file_ids)
        litter = list(self._litter)

        def release(disk: BatchStore) -> None:
            for file_id in litter:
                disk.space.release(file_id)

        try:
            if litter:
                await self.run(release)
                self._litter.difference_update(litter)
        except (sqlite3.Error, OSError, StoreDamaged) as error:
            logger.warning("what is left of an upload cannot be removed yet: %s", error)

    def close(self) -> None:
        """Finish what is queued, then close the store."""
        self._pool.submit(self._close)
        self._pool.shutdown(wait=True)

    def _close(self) -> None:
        try:
            if self.at_close is not None:
                self.store.transact(self.at_close)
        except (sqlite3.Error, OSError, StoreDamaged) as error:
            logger.warning("the data folder refuses at the end: %s", error)
        finally:
            self.store.close()
