"""The records of files and batches, and the tables in which they are kept. Owns the schema and its versions.

Does not own what is done with the tables (`store.py`, `space.py`, `queue.py`, `outputs.py`).
Invariants: a folder of an older version is brought to this one in a single transaction; one of a newer version is
refused.
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import Any

import msgspec

VERSION = 2
WHOLE_INPUT = -1
"""The number under which the reading of the input as a whole is queued, before its lines are known."""
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")

_TABLES = """
create table if not exists files (
    id text primary key, owner text not null, purpose text not null, filename text not null, bytes integer not null,
    created_at integer not null);
create table if not exists batches (
    id text primary key, owner text not null, status text not null, created_at integer not null, record text not null,
    input_file_id text not null default '', expires_at integer not null default 0, ending text,
    n_total integer not null default 0, n_completed integer not null default 0, n_failed integer not null default 0);
create table if not exists results (
    batch_id text not null, line integer not null, is_error integer not null, output blob not null,
    primary key (batch_id, line)) without rowid;
"""
_COLUMNS = (
    "input_file_id text not null default ''", "expires_at integer not null default 0", "ending text",
    "n_total integer not null default 0", "n_completed integer not null default 0",
    "n_failed integer not null default 0",
)  # fmt: skip
"""Columns of `batches` that version 1 lacks. `ending` names the end that a batch is being taken to."""
_REST = """
create table if not exists lines (
    batch_id text not null, line integer not null, offset integer not null, length integer not null,
    is_double integer not null, state integer not null default 0, deaths integer not null default 0,
    primary key (batch_id, line)) without rowid;
create index if not exists suspects on lines (deaths) where state = 2;
create table if not exists unfinished (
    id text primary key, owner text not null, bytes integer not null, holder text not null, batch_id text not null,
    is_error integer not null) without rowid;
create table if not exists usage (owner text primary key, bytes integer not null) without rowid;
create index if not exists batches_queued on batches (owner) where status = 'validating' and ending is null;
create index if not exists batches_running on batches (owner) where status = 'in_progress' and ending is null;
create index if not exists batches_ending on batches (owner) where ending is not null;
create index if not exists batches_due on batches (expires_at) where status = 'in_progress' and ending is null;
create index if not exists batches_by_input on batches (input_file_id)
    where status in ('validating', 'in_progress', 'finalizing', 'cancelling');
drop index if exists batches_by_status;
"""


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


def fresh_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(12)


def problem(code: str, message: str) -> dict[str, Any]:
    """`errors` of a batch that failed."""
    found = {"code": code, "message": message, "param": "input_file_id", "line": None}
    return {"object": "list", "data": [found]}


def decoded(batch_id: str, status: str, created_at: int, record: str) -> BatchRecord:
    """The record of a row. One that cannot be read is stood in for by one that says so."""
    try:
        return msgspec.json.decode(record, type=BatchRecord)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return BatchRecord(
            id=batch_id, endpoint="", input_file_id="", completion_window="24h", created_at=created_at,
            expires_at=created_at, status=status, errors=problem("record_damaged", DAMAGED),
        )  # fmt: skip


DAMAGED = "The record of this batch cannot be read: make a new batch."


def is_damaged(batch: BatchRecord) -> bool:
    """True for what `decoded` made up."""
    return not batch.endpoint


def prepare(database: sqlite3.Connection) -> int:
    """Bring a database to this version; returns the version found when it is one that cannot be used, else `VERSION`.
    Raises sqlite3.Error."""
    database.execute("pragma auto_vacuum = incremental")  # works on a new database only, before anything is in it
    database.execute("pragma journal_mode = wal")
    database.execute("pragma synchronous = normal")
    database.execute(f"pragma journal_size_limit = {16 << 20}")
    database.execute("begin immediate")
    try:
        found = int(database.execute("pragma user_version").fetchone()[0])
        if found == 1:
            _bring_to_2(database)
        if found in (0, 1):
            for statement in filter(str.strip, (_TABLES + _REST).split(";")):
                database.execute(statement)
            if found == 1:
                _count_anew(database)
            database.execute(f"pragma user_version = {VERSION}")
        database.execute("commit")
    finally:
        if database.in_transaction:
            database.execute("rollback")
    return VERSION if found in (0, 1) else found


def _bring_to_2(database: sqlite3.Connection) -> None:
    """What was only in the JSON of a record gets columns; open batches are read again, without the lines they have."""
    for column in _COLUMNS:
        database.execute(f"alter table batches add column {column}")
    rows = database.execute("select id, status, created_at, record from batches").fetchall()
    for row in rows:
        batch = decoded(*row)
        counts = batch.request_counts
        if row[1] in OPEN_STATUSES:
            query = "select count(*) filter (where not is_error), count(*) filter (where is_error) from results"
            counts.completed, counts.failed = database.execute(f"{query} where batch_id = ?", (batch.id,)).fetchone()
        status = row[1] if row[1] != "in_progress" else "validating"
        database.execute(
            "update batches set status = ?, input_file_id = ?, expires_at = ?, ending = ?, n_total = ?,"
            " n_completed = ?, n_failed = ? where id = ?",
            (
                status, batch.input_file_id, batch.expires_at, "cancelled" if status == "cancelling" else None,
                counts.total, counts.completed, counts.failed, batch.id,
            ),
        )  # fmt: skip


def _count_anew(database: sqlite3.Connection) -> None:
    database.execute(
        "insert into usage select owner, sum(bytes) from (select owner, bytes from files union all"
        " select b.owner, length(r.output) + 1 from results r join batches b on b.id = r.batch_id) group by owner"
    )
    database.execute(
        "insert into lines (batch_id, line, offset, length, is_double)"
        f" select id, {WHOLE_INPUT}, 0, coalesce((select bytes from files f where f.id = input_file_id), 0), 0"
        " from batches where status = 'validating' and ending is null"
    )
