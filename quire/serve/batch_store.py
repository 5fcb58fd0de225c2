"""Files and batches on disk: records in SQLite, contents beside it. Owns the folder; does not own what batches do.

Synchronous: `StoreThread` runs it. Names on disk are ours alone, never a client's.
Invariants: a record exists only once its content is complete; a result is stored once; after a crash whatever was
recorded is still there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import pathlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from quire.core.errors import ConfigError

T = TypeVar("T")

DATABASE = "quire.sqlite3"
_SCHEMA = """
create table if not exists files (
    id text primary key, owner text not null, purpose text not null, filename text not null, bytes integer not null,
    created_at integer not null);
create table if not exists batches (
    id text primary key, owner text not null, status text not null, created_at integer not null, record text not null);
create index if not exists batches_by_status on batches (status);
create table if not exists results (
    batch_id text not null, line integer not null, is_error integer not null, output blob not null,
    primary key (batch_id, line)) without rowid;
"""
_VERSION = 1
ORPHAN_S = 2 * 3600
"""Age at which a content without a record is nobody's any more: longer than an upload may take."""


class FileRecord(msgspec.Struct, kw_only=True):
    """A stored file, in OpenAI's shape."""

    id: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    object: str = "file"
    status: str = "processed"


class Counts(msgspec.Struct):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, in OpenAI's shape."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    object: str = "batch"
    model: str | None = None
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None


OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")


def fresh_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(12)


class BatchStore:
    """One folder. Raises sqlite3.Error or OSError when the disk refuses."""

    def __init__(self, folder: pathlib.Path) -> None:
        """ConfigError if the folder cannot be used."""
        self.folder = folder
        self._contents = folder / "files"
        try:
            self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                folder / DATABASE, timeout=10, isolation_level=None, check_same_thread=False
            )
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = normal")
            version = self._database.execute("pragma user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise ConfigError(f"data_dir = {str(folder)!r} was written by another version of Quire ({version})")
            self._database.executescript(_SCHEMA)
            self._database.execute(f"pragma user_version = {_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"data_dir = {str(folder)!r} cannot be used: {error}") from None

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def transact(self, work: Callable[[BatchStore], T]) -> T:
        """Result of `work`, whose changes are made all or none, and not amid those of another process."""
        self._database.execute("begin immediate")
        end = "rollback"
        try:
            result = work(self)
            end = "commit"
        finally:
            self._database.execute(end)
        return result

    def sweep(self) -> None:
        """Remove contents without a record, of uploads or batches that a crash cut short."""
        old_s = time.time() - ORPHAN_S
        for path in self._contents.iterdir():
            known = self._database.execute("select 1 from files where id = ?", (path.name,)).fetchone()
            if known is None and path.stat().st_mtime < old_s:
                path.unlink(missing_ok=True)

    # ---- files

    def content_path(self, file_id: str) -> pathlib.Path:
        """Where the content of a file is; `file_id` must be of a record or `fresh_id`."""
        return self._contents / file_id

    def add_file(self, owner: str, record: FileRecord) -> None:
        """Record a file whose content is complete."""
        row = (record.id, owner, record.purpose, record.filename, record.bytes, record.created_at)
        self._database.execute("insert into files values (?, ?, ?, ?, ?, ?)", row)

    def file(self, owner: str, file_id: str) -> FileRecord | None:
        """An owner's file by its exact id."""
        return next(self._files("where owner = ? and id = ?", owner, file_id), None)

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int) -> list[FileRecord]:
        """Newest first."""
        clause = "where owner = ?1 and (?2 is null or purpose = ?2)"
        clause += " and (?3 is null or rowid < (select rowid from files where owner = ?1 and id = ?3))"
        return list(self._files(f"{clause} order by rowid desc limit ?4", owner, purpose, after, limit))

    def delete_file(self, file_id: str) -> bool:
        """Forget a file and its content; False if there was none."""
        gone = self._database.execute("delete from files where id = ?", (file_id,)).rowcount > 0
        if gone:
            self.content_path(file_id).unlink(missing_ok=True)
        return gone

    def stored_bytes(self) -> int:
        """Of all files."""
        return int(self._database.execute("select coalesce(sum(bytes), 0) from files").fetchone()[0])

    def _files(self, clause: str, *values: object) -> Iterator[FileRecord]:
        query = f"select id, purpose, filename, bytes, created_at from files {clause}"
        for file_id, purpose, filename, n_bytes, created_at in self._database.execute(query, values):
            yield FileRecord(id=file_id, purpose=purpose, filename=filename, bytes=n_bytes, created_at=created_at)

    # ---- batches

    def add_batch(self, owner: str, batch: BatchRecord) -> None:
        """A new batch."""
        row = (batch.id, owner, batch.status, batch.created_at, msgspec.json.encode(batch).decode())
        self._database.execute("insert into batches values (?, ?, ?, ?, ?)", row)

    def save_batch(self, batch: BatchRecord) -> None:
        """What has become of a batch."""
        row = (batch.status, msgspec.json.encode(batch).decode(), batch.id)
        self._database.execute("update batches set status = ?, record = ? where id = ?", row)

    def batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        """An owner's batch by its exact id."""
        return next(self._batches("where owner = ? and id = ?", owner, batch_id), None)

    def batches(self, owner: str, after: str | None, limit: int) -> list[BatchRecord]:
        """Newest first."""
        clause = "where owner = ?1 and (?2 is null or rowid < (select rowid from batches where owner = ?1 and id = ?2))"
        return list(self._batches(f"{clause} order by rowid desc limit ?3", owner, after, limit))

    def open_batches(self) -> list[tuple[str, BatchRecord]]:
        """(owner, batch) of those that are not at their end, oldest first."""
        marks = ", ".join("?" * len(OPEN_STATUSES))
        query = f"select owner, record from batches where status in ({marks}) order by rowid"
        rows = self._database.execute(query, OPEN_STATUSES)
        return [(owner, msgspec.json.decode(record, type=BatchRecord)) for owner, record in rows]

    def cancel_batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        """Ask for the end of a batch that is not at its end; None if there is no such batch."""
        batch = self.batch(owner, batch_id)
        if batch is not None and batch.status in ("validating", "in_progress"):
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            self.save_batch(batch)
        return batch

    def _batches(self, clause: str, *values: object) -> Iterator[BatchRecord]:
        for (record,) in self._database.execute(f"select record from batches {clause}", values):
            yield msgspec.json.decode(record, type=BatchRecord)

    # ---- results

    def add_result(self, batch_id: str, line: int, output: bytes, *, is_error: bool) -> None:
        """Keep the output of a line; of two for one line the first stays."""
        row = (batch_id, line, int(is_error), output)
        self._database.execute("insert or ignore into results values (?, ?, ?, ?)", row)

    def done_lines(self, batch_id: str) -> set[int]:
        """Lines that have their output."""
        return {row[0] for row in self._database.execute("select line from results where batch_id = ?", (batch_id,))}

    def counts(self, batch_id: str) -> tuple[int, int]:
        """(completed, failed) lines so far."""
        query = "select count(*) filter (where not is_error), count(*) filter (where is_error) from results"
        completed, failed = self._database.execute(f"{query} where batch_id = ?", (batch_id,)).fetchone()
        return completed, failed

    def write_results(self, owner: str, batch_id: str, is_error: bool, filename: str) -> str | None:
        """The outputs of one kind as a new file, in the order of their lines; its id, None if there are none."""
        rows = self._database.execute(
            "select output from results where batch_id = ? and is_error = ? order by line", (batch_id, int(is_error))
        )
        file_id, n_bytes = fresh_id("file-"), 0
        path = self.content_path(file_id)
        is_kept = False
        try:
            with path.open("xb") as content:
                for (output,) in rows:
                    n_bytes += content.write(output + b"\n")
            if n_bytes:
                now_s = int(time.time())
                record = FileRecord(
                    id=file_id, purpose="batch_output", filename=filename, bytes=n_bytes, created_at=now_s
                )
                self.add_file(owner, record)
                is_kept = True
        finally:
            if not is_kept:
                path.unlink(missing_ok=True)
        return file_id if is_kept else None

    def drop_results(self, batch_id: str) -> None:
        """They are in files now."""
        self._database.execute("delete from results where batch_id = ?", (batch_id,))


class StoreThread:
    """The one thread that talks to the disk, so that a slow disk delays no stream."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="quire-store")

    async def run(self, work: Callable[[BatchStore], T]) -> T:
        """Result of `work`. Raises what it raises: sqlite3.Error or OSError when the disk refuses."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.store.transact, work)

    def close(self) -> None:
        """Finish what is queued, then close the store."""
        self._pool.submit(self.store.close)
        self._pool.shutdown(wait=True)
