"""/v1/files: the inputs and outputs of batches. Owns uploads, and who may delete what; the disk is `store.py`'s.

Invariants: an upload is on disk as it comes, never in memory, and only what was reserved before is written; what was
not completed leaves nothing behind; a content is sent as it was stored, or the connection is cut.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import IO, TypeVar

from quire.core.errors import shown
from quire.serve.batch.listing import list_query_of
from quire.serve.batch.outputs import make_durable
from quire.serve.batch.schema import FileRecord, fresh_id
from quire.serve.batch.space import StorageFull
from quire.serve.batch.store import BatchStore, FileInUse, StoreDamaged, StoreThread, is_disk_trouble
from quire.serve.http.exchange import ClientGone, Exchange
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.multipart import PartBegin, boundary_of, read_parts
from quire.serve.http.refusal import MISSING, Refusal, bad_request, unsupported
from quire.serve.state import ServerState

logger = logging.getLogger("quire.batch")

T = TypeVar("T")

MAX_FIELD_BYTES = 1024
MAX_FILENAME_CHARS = 255
FORM_BYTES = 64 * 1024
"""Room for what surrounds the file in a form."""
UPLOAD_S = 3600.0
"""Seconds in which an upload must be complete, as long as it goes on at all."""
WRITE_BYTES = 1 << 20
"""Bytes that are gathered for one write, or read at once."""
SEND_BYTES = 1 << 16
"""Bytes that a client must take within --write-timeout."""
NDJSON = b"application/jsonl"
_EXPIRY = "expires_after"


async def serve_file_upload(state: ServerState, exchange: Exchange) -> None:
    """Keep a file. Form fields: `purpose` (batch) and `file`."""
    store = store_of(state)
    types = exchange.header(b"content-type")
    boundary = boundary_of(types[0] if len(types) == 1 else b"")
    limit = state.config.max_file_bytes
    upload = _Upload(store, exchange.tenant.name, fresh_id("file-"), limit, exchange.ignored)
    await store.discard()
    try:
        chunks = exchange.read_chunks(limit + FORM_BYTES, state.config.body_timeout, UPLOAD_S)
        async for found in read_parts(chunks, boundary):
            await upload.take(found)
        record = await upload.finish()
    finally:
        if not upload.is_kept:
            await asyncio.shield(store.discard(upload.file_id))
    await exchange.respond_json(record)


async def serve_files(state: ServerState, exchange: Exchange) -> None:
    """Files, newest first. Query: purpose, limit, after."""
    store = store_of(state)
    query = list_query_of(exchange, ("purpose",), most=10_000)
    owner, purpose = exchange.tenant.name, query.values.get("purpose")
    found = await stored(store, lambda disk: disk.files(owner, purpose, query.after, query.limit + 1))
    await exchange.respond_json(query.listed(found))


async def serve_file(state: ServerState, exchange: Exchange) -> None:
    """One file's record."""
    await exchange.respond_json(await _file(store_of(state), exchange))


async def serve_file_content(state: ServerState, exchange: Exchange) -> None:
    """One file's content."""
    store = store_of(state)
    record = await _file(store, exchange)
    content = await store.aside(lambda: _opened(store.store.content_path(record.id), record))
    with content:
        await exchange.start(200, NDJSON, [(b"x-content-type-options", b"nosniff")], record.bytes)
        left = 0 if exchange.scope["method"] == "HEAD" else record.bytes
        while left:
            data = (await store.aside(lambda: content.read(WRITE_BYTES)))[:left]
            if not data:
                raise OSError(f"the content of {record.id} is shorter than its record")
            left -= len(data)
            for at in range(0, len(data), SEND_BYTES):
                await _sent(exchange, data[at : at + SEND_BYTES], state.config.write_timeout)
        await exchange.write(b"", more=False)


async def serve_file_delete(state: ServerState, exchange: Exchange) -> None:
    """Forget a file, unless a batch still needs it."""
    store = store_of(state)
    owner, file_id = exchange.tenant.name, exchange.scope["path_params"]["file_id"]
    try:
        deleted = await stored(store, lambda disk: disk.delete_file(owner, file_id))
    except FileInUse:
        message = "The file is the input of a batch that is not finished: cancel the batch first."
        raise bad_request(message, "file_id") from None
    if not deleted:
        raise _unknown(file_id)
    await exchange.respond_json({"id": file_id, "object": "file", "deleted": True})


def store_of(state: ServerState) -> StoreThread:
    """The store. Raises a 400 Refusal when the operator keeps nothing, 503 while draining."""
    state.check_open()
    if state.store is None:
        raise bad_request(
            "This server keeps no files: the operator can turn files and batches on with --data-dir.",
            code="files_disabled",
        )
    return state.store


async def stored(store: StoreThread, work: Callable[[BatchStore], T]) -> T:
    """Result of `work` on the disk. Raises a Refusal: 507 when the disk refuses or has no room, 500 when damaged."""
    return await _guarded(store.run(work))


async def _guarded(work: Awaitable[T]) -> T:
    try:
        return await work
    except StorageFull as full:
        raise Refusal(507, full.message, code=full.code, close=True) from None
    except StoreDamaged:
        message = "The server's records of files and batches are damaged; its operator finds more in the log."
        raise Refusal(500, message, code="storage_damaged") from None
    except (sqlite3.Error, OSError) as error:
        if not is_disk_trouble(error):
            raise
        logger.warning("the data folder refuses: %s", error)
        raise Refusal(507, "The server's disk refuses: it may be full.", code="storage_failed") from None


def _opened(path: pathlib.Path, record: FileRecord) -> IO[bytes]:
    """The content of a file. Raises a 500 Refusal unless all of it is there."""
    try:
        content = path.open("rb")
        if os.fstat(content.fileno()).st_size >= record.bytes:
            return content
        content.close()
        why = f"shorter than the {record.bytes} bytes of its record"
    except OSError as error:
        why = error.strerror or str(error)
    logger.error("the content of %s cannot be read: %s", record.id, why)
    message = f"The content of {record.id} is not on the server's disk any more: delete the file and upload it again."
    raise Refusal(500, message, code="content_lost")


async def _sent(exchange: Exchange, data: bytes, limit_s: float) -> None:
    """Raises ClientGone, with the connection cut, when the client does not take it in time."""
    try:
        async with asyncio.timeout(limit_s):
            await exchange.write(data, more=True)
    except TimeoutError:
        await exchange.abort()
        raise ClientGone from None


async def _file(store: StoreThread, exchange: Exchange) -> FileRecord:
    file_id: str = exchange.scope["path_params"]["file_id"]
    record = await stored(store, lambda disk: disk.file(exchange.tenant.name, file_id))
    if record is None:
        raise _unknown(file_id)
    return record


def _unknown(file_id: str) -> Refusal:
    return Refusal(404, f"There is no file {shown(file_id)}.", param="file_id", code="not_found")


class _Upload:
    """A form on its way to the disk."""

    def __init__(self, store: StoreThread, owner: str, file_id: str, limit: int, ignored: IgnoredParams) -> None:
        """limit: bytes that a file may have. ignored: is told of fields that do nothing."""
        self.file_id = file_id
        self.is_kept = False
        """True once it has its record."""
        self._store = store
        self._owner = owner
        self._limit = limit
        self._ignored = ignored
        self._path = store.store.content_path(file_id)
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._part = ""
        self._waiting = bytearray()
        self._n_bytes = 0

    async def take(self, found: PartBegin | bytes) -> None:
        """The next piece of the form."""
        if isinstance(found, PartBegin):
            self._begin(found)
        elif self._part == "file":
            self._n_bytes += len(found)
            if self._n_bytes > self._limit:
                message = f"The file is longer than {self._limit} bytes (--max-file-bytes)."
                raise Refusal(413, message, code="content_too_large", close=True)
            self._waiting += found
            if len(self._waiting) >= WRITE_BYTES:
                await self._write()
        elif self._part in self._fields:
            field = self._fields[self._part]
            field += found
            if len(field) > MAX_FIELD_BYTES:
                raise bad_request(f"{shown(self._part)} is longer than {MAX_FIELD_BYTES} bytes.", "purpose")

    async def finish(self) -> FileRecord:
        """Keep the complete file; its record. Raises a 400 Refusal for a form that lacks something."""
        purpose = bytes(self._fields.get("purpose", b"")).decode(errors="replace")
        if not purpose:
            raise bad_request("purpose is missing.", "purpose", MISSING)
        if purpose != "batch":
            raise unsupported("purpose", f"only batch is, not {shown(purpose)}.")
        if self._filename is None:
            raise bad_request("file is missing.", "file", MISSING)
        if not self._n_bytes:
            raise bad_request("file is empty.", "file")
        await self._write(is_last=True)
        name = "".join(char for char in self._filename if char.isprintable())[:MAX_FILENAME_CHARS]
        record = FileRecord(
            id=self.file_id, purpose=purpose, filename=name or "file", bytes=self._n_bytes, created_at=int(time.time())
        )
        self.is_kept = await stored(self._store, lambda disk: disk.keep_upload(self._owner, record))
        if not self.is_kept:
            raise Refusal(507, "The server's disk has lost a part of this upload.", code="storage_failed")
        return record

    def _begin(self, part: PartBegin) -> None:
        self._part = part.name
        if part.name == "file":
            if self._filename is not None:
                raise bad_request("file is given twice.", "file")
            self._filename = part.filename or ""
        elif part.name == "purpose":
            if part.name in self._fields:
                raise bad_request("purpose is given twice.", "purpose")
            self._fields[part.name] = bytearray()
        elif part.name.startswith(_EXPIRY):
            raise unsupported(_EXPIRY, "files are kept until they are deleted.")
        else:
            self._ignored.note_member("", part.name, ("purpose", "file"))

    async def _write(self, *, is_last: bool = False) -> None:
        data, self._waiting = self._waiting, bytearray()
        await stored(self._store, lambda disk: disk.space.reserve(self.file_id, self._owner, len(data)))
        await _guarded(self._store.aside(lambda: _append(self._path, data, is_last)))


def _append(path: pathlib.Path, data: bytes | bytearray, is_last: bool) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.open("ab") as content:
        content.write(data)
        content.flush()
        if is_last:
            os.fsync(content.fileno())
            make_durable(path.parent)
