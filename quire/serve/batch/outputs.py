"""How results become files: piece by piece, so that they are on the disk once. Owns the way from `results` to `files`.

Works inside the transactions of `BatchStore`; `append` is for a thread of its own.
Invariants: a result is in its table or in its file, also after a crash; the lines of a file are in the order of the
input; no byte is counted twice.
"""

from __future__ import annotations

import os
import pathlib
import sqlite3
import time

from quire.serve.batch.schema import BatchRecord, FileRecord, fresh_id
from quire.serve.batch.space import Space

PIECE_BYTES = 4 << 20
"""Results that are moved at once; a longer one is a piece by itself."""
PIECE_ROWS = 4096


class ContentLost(Exception):
    """The content of a file is not on the disk, or not all of it."""


class ResultPiece:
    """The next results of a batch."""

    def __init__(self, rows: list[tuple[int, bool, bytes]], targets: dict[bool, tuple[str, int]]) -> None:
        """rows: (line, is it an error, output); targets: the file for each kind, and how many bytes it has."""
        self.last_line = rows[-1][0]
        self.targets = targets
        self.data = {kind: b"".join(row[2] + b"\n" for row in rows if row[1] is kind) for kind in targets}


class Outputs:
    """Results on their way into files."""

    def __init__(self, database: sqlite3.Connection, space: Space) -> None:
        self._database = database
        self._space = space

    def next_piece(self, owner: str, batch_id: str) -> ResultPiece | None:
        """What is to be moved next, None at the end."""
        query = "select line, is_error, output from results where batch_id = ? order by line limit ?"
        rows: list[tuple[int, bool, bytes]] = []
        n_bytes = 0
        for line, is_error, output in self._database.execute(query, (batch_id, PIECE_ROWS)):
            rows.append((line, bool(is_error), output))
            n_bytes += len(output) + 1
            if n_bytes >= PIECE_BYTES:
                break
        if not rows:
            return None
        targets = self._targets(batch_id)
        for kind in {row[1] for row in rows} - targets.keys():
            targets[kind] = (fresh_id("file-"), 0)
            self._database.execute(
                "insert into unfinished values (?, ?, 0, '', ?, ?)", (targets[kind][0], owner, batch_id, int(kind))
            )
        return ResultPiece(rows, {kind: targets[kind] for kind in {row[1] for row in rows}})

    def moved(self, batch_id: str, piece: ResultPiece) -> None:
        """The piece is in its files, and durable."""
        self._database.execute("delete from results where batch_id = ? and line <= ?", (batch_id, piece.last_line))
        for kind, (file_id, n_before) in piece.targets.items():
            n_bytes = n_before + len(piece.data[kind])
            self._database.execute("update unfinished set bytes = ? where id = ?", (n_bytes, file_id))

    def shorten(self) -> None:
        """Give room of the database back that no result needs any more."""
        self._database.execute("pragma incremental_vacuum").fetchall()

    def lost(self, owner: str, piece: ResultPiece, kind: bool) -> None:
        """The file of one kind is gone: it begins anew with this piece."""
        file_id, n_bytes = piece.targets[kind]
        self._database.execute("update unfinished set bytes = 0 where id = ?", (file_id,))
        self._space.charge(owner, -n_bytes)

    def forget(self, owner: str, batch_id: str) -> None:
        """Give up the results that are not in files yet."""
        query = "select coalesce(sum(length(output) + 1), 0) from results where batch_id = ?"
        n_bytes = self._database.execute(query, (batch_id,)).fetchone()[0]
        self._database.execute("delete from results where batch_id = ?", (batch_id,))
        self._space.charge(owner, -n_bytes)

    def publish(self, owner: str, batch: BatchRecord) -> list[FileRecord]:
        """The files of a batch whose results are all in them; notes their ids in the record."""
        found: list[FileRecord] = []
        for kind, (file_id, n_bytes) in self._targets(batch.id).items():
            self._database.execute("delete from unfinished where id = ?", (file_id,))
            if not n_bytes:
                self._space.gone.append(file_id)
                continue
            name = "error" if kind else "output"
            setattr(batch, f"{name}_file_id", file_id)
            filename, now_s = f"{batch.id}_{name}.jsonl", int(time.time())
            found.append(
                FileRecord(id=file_id, purpose="batch_output", filename=filename, bytes=n_bytes, created_at=now_s)
            )
        return found

    def _targets(self, batch_id: str) -> dict[bool, tuple[str, int]]:
        query = "select is_error, id, bytes from unfinished where batch_id = ?"
        return {bool(kind): (file_id, n) for kind, file_id, n in self._database.execute(query, (batch_id,))}


def append(path: pathlib.Path, n_before: int, data: bytes) -> None:
    """Write `data` behind the first `n_before` bytes of a file, durably; what a crash had left there goes.

    Raises ContentLost when the file has fewer, OSError when the disk refuses."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=0) as content:
        if os.fstat(fd).st_size < n_before:
            raise ContentLost(f"{path} has fewer than {n_before} bytes")
        os.ftruncate(fd, n_before)
        content.seek(n_before)
        left = memoryview(data)
        while left:
            left = left[content.write(left) :]
        os.fsync(fd)
    if not n_before:
        make_durable(path.parent)


def make_durable(folder: pathlib.Path) -> None:
    """Names in a folder survive a loss of power from now on. OSError when the disk refuses."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
