"""/v1/files: the inputs and outputs of batches. Owns uploads, and who may delete what; the disk is `batch_store.py`'s.

Invariants: an upload is on disk as it comes, never in memory; what was not completed leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import pathlib
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from quire.core.errors import shown
from quire.serve.batch_store import BatchStore, FileRecord, StoreThread, fresh_id
from quire.serve.exchange import Exchange
from quire.serve.multipart import MultipartReader, PartBegin, boundary_of
from quire.serve.pages import page_of
from quire.serve.refusal import Refusal, bad_request, unsupported
from quire.serve.state import ServerState

T = TypeVar("T")

MAX_FIELD_BYTES = 1024
MAX_FILENAME_CHARS = 255
FORM_BYTES = 64 * 1024
"""Room for what surrounds the file in a form."""
UPLOAD_S = 3600.0
"""Seconds in which an upload must be complete, as long as it goes on at all."""
WRITE_BYTES = 1 << 20
"""Bytes that are gathered for one write."""
NDJSON = b"application/jsonl"


async def serve_file_upload(state: ServerState, exchange: Exchange) -> None:
    """Keep a file. Form fields: `purpose` (batch) and `file`."""
    store = store_of(state)
    types = exchange.header(b"content-type")
    boundary = boundary_of(types[0].decode("latin-1") if len(types) == 1 else "")
    free = state.config.max_data_bytes - await stored(store, lambda disk: disk.stored_bytes())
    file_id = fresh_id("file-")
    upload = _Upload(
        store.store.content_path(file_id), min(state.config.max_file_bytes, free), state.config.max_file_bytes
    )
    try:
        reader = MultipartReader(boundary)
        limit = state.config.max_file_bytes + FORM_BYTES
        async for chunk in exchange.read_chunks(limit, state.config.body_timeout, UPLOAD_S):
            for found in reader.feed(chunk):
                await upload.take(found)
        reader.finish()
        record = await upload.finish(file_id)
        await stored(store, lambda disk: disk.add_file(exchange.tenant.name, record))
        upload.is_kept = True
    finally:
        if not upload.is_kept:
            await asyncio.shield(asyncio.to_thread(upload.discard))
    await exchange.respond_json(record)


async def serve_files(state: ServerState, exchange: Exchange) -> None:
    """Files, newest first. Query: purpose, limit, after."""
    store = store_of(state)
    page = page_of(exchange, ("purpose",), most=10_000)
    owner, purpose = exchange.tenant.name, page.values.get("purpose")
    found = await stored(store, lambda disk: disk.files(owner, purpose, page.after, page.limit + 1))
    await exchange.respond_json(page.listed(found))


async def serve_file(state: ServerState, exchange: Exchange) -> None:
    """One file's record."""
    await exchange.respond_json(await _file(store_of(state), exchange))


async def serve_file_content(state: ServerState, exchange: Exchange) -> None:
    """One file's content."""
    store = store_of(state)
    record = await _file(store, exchange)
    path = store.store.content_path(record.id)
    content = await asyncio.to_thread(path.open, "rb")
    with content:
        await exchange.start(200, NDJSON, [(b"x-content-type-options", b"nosniff")], record.bytes)
        left = record.bytes
        while left:
            data = await asyncio.to_thread(content.read, min(WRITE_BYTES, left))
            if not data:
                raise OSError("a stored file is shorter than its record")
            left -= len(data)
            async with asyncio.timeout(state.config.write_timeout):
                await exchange.write(data, more=True)
        await exchange.write(b"", more=False)


async def serve_file_delete(state: ServerState, exchange: Exchange) -> None:
    """Forget a file, unless a batch still needs it."""
    store = store_of(state)
    record = await _file(store, exchange)
    if any(batch.input_file_id == record.id for _, batch in await stored(store, lambda disk: disk.open_batches())):
        raise bad_request("The file is the input of a batch that is not finished: cancel the batch first.", "file_id")
    deleted = await stored(store, lambda disk: disk.delete_file(record.id))
    await exchange.respond_json({"id": record.id, "object": "file", "deleted": deleted})


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
    """Result of `work` on the disk. Raises a 507 Refusal when the disk refuses."""
    return await _guarded(store.run(work))


async def _guarded(work: Awaitable[T]) -> T:
    try:
        return await work
    except (sqlite3.Error, OSError):
        raise storage_failed() from None


def storage_failed() -> Refusal:
    """507 with a fixed text."""
    return Refusal(507, "The server's disk refuses: it may be full.", code="storage_failed")


async def _file(store: StoreThread, exchange: Exchange) -> FileRecord:
    file_id: str = exchange.scope["path_params"]["file_id"]
    record = await stored(store, lambda disk: disk.file(exchange.tenant.name, file_id))
    if record is None:
        raise Refusal(404, f"There is no file {shown(file_id)}.", param="file_id", code="not_found")
    return record


class _Upload:
    """A form on its way to the disk."""

    def __init__(self, path: pathlib.Path, room: int, limit: int) -> None:
        self._path = path
        self._room = room
        """Bytes that the file may have."""
        self._limit = limit
        self.is_kept = False
        """True once it has its record."""
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
            if self._n_bytes > self._room:
                if self._room < self._limit:
                    raise Refusal(507, "The server's files have no room for this one.", code="storage_full", close=True)
                raise Refusal(
                    413, f"The file is longer than {self._limit} bytes.", code="content_too_large", close=True
                )
            self._waiting += found
            if len(self._waiting) >= WRITE_BYTES:
                await self._write()
        else:
            field = self._fields[self._part]
            field += found
            if len(field) > MAX_FIELD_BYTES:
                raise bad_request(f"{shown(self._part)} is longer than {MAX_FIELD_BYTES} bytes.", "purpose")

    async def finish(self, file_id: str) -> FileRecord:
        """The record of the complete file. Raises a 400 Refusal for a form that lacks something."""
        purpose = bytes(self._fields.get("purpose", b"")).decode(errors="replace")
        if not purpose:
            raise bad_request("purpose is missing.", "purpose", "missing_required_parameter")
        if purpose != "batch":
            raise unsupported("purpose", f"only batch is, not {shown(purpose)}.")
        if self._filename is None:
            raise bad_request("file is missing.", "file", "missing_required_parameter")
        if not self._n_bytes:
            raise bad_request("file is empty.", "file")
        await self._write()
        name = "".join(char for char in self._filename if char.isprintable())[:MAX_FILENAME_CHARS]
        return FileRecord(
            id=file_id, purpose=purpose, filename=name or "file", bytes=self._n_bytes, created_at=int(time.time())
        )

    def discard(self) -> None:
        """Leave nothing behind."""
        self._path.unlink(missing_ok=True)

    def _begin(self, part: PartBegin) -> None:
        self._part = part.name
        if part.name == "file":
            if self._filename is not None:
                raise bad_request("file is given twice.", "file")
            self._filename = part.filename or ""
        elif part.name in self._fields or part.name != "purpose":
            code = "invalid_value" if part.name == "purpose" else "unknown_parameter"
            raise bad_request(f"Unknown field {shown(part.name)}.", part.name[:64], code)
        else:
            self._fields[part.name] = bytearray()

    async def _write(self) -> None:
        data, self._waiting = self._waiting, bytearray()
        await _guarded(asyncio.to_thread(self._append, data))

    def _append(self, data: bytes | bytearray) -> None:
        with self._path.open("ab") as content:
            content.write(data)
