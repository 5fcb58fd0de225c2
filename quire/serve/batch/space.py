"""How many bytes files, uploads and results have, and how many they may have: all together, and each owner.

Owns the tables `usage` and `unfinished`. Works inside the transactions of `BatchStore`.
Invariants: `usage` is the sum of files, unfinished files and results, always; no charge goes beyond a limit, also when
several processes charge at once; what a dead process had reserved is free again once somebody needs it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sqlite3

from quire.serve.batch.locks import Holder, is_dead


class StorageFull(Exception):
    """So many bytes more do not fit. `message` is for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclasses.dataclass(frozen=True, slots=True)
class SpaceLimits:
    """Bytes; 0 is no limit."""

    whole: int = 0
    owner: int = 0


class Space:
    """The bytes of one folder."""

    def __init__(self, database: sqlite3.Connection, folder: pathlib.Path, limits: SpaceLimits) -> None:
        self._database = database
        self._holders = folder / "holders"
        self._limits = limits
        self._holder: Holder | None = None
        self.gone: list[str] = []
        """Files without a record: their contents are to be removed once the transaction has held."""

    def close(self) -> None:
        """This process reserves nothing any more."""
        if self._holder is not None:
            self._holder.close()

    def used(self, owner: str | None = None) -> int:
        """Bytes of an owner, or of all."""
        clause = "" if owner is None else " where owner = ?"
        values = () if owner is None else (owner,)
        return int(self._database.execute(f"select coalesce(sum(bytes), 0) from usage{clause}", values).fetchone()[0])

    def charge(self, owner: str, n_bytes: int) -> None:
        """Count bytes that come (or go: less than 0). Raises StorageFull, with nothing changed."""
        if n_bytes > 0:
            full = self._refusal(owner, n_bytes)
            if full is not None and self.forget_dead():
                full = self._refusal(owner, n_bytes)
            if full is not None:
                raise full
        self._database.execute(
            "insert into usage values (?1, ?2) on conflict (owner) do update set bytes = bytes + ?2", (owner, n_bytes)
        )

    def reserve(self, file_id: str, owner: str, n_bytes: int) -> None:
        """Room for so many bytes more of an upload by this process. Raises StorageFull."""
        if self._holder is None:
            self._holder = Holder(self._holders)
        self.charge(owner, n_bytes)
        self._database.execute(
            "insert into unfinished values (?1, ?2, ?3, ?4, '', 0) on conflict (id) do update set bytes = bytes + ?3",
            (file_id, owner, n_bytes, self._holder.name),
        )

    def finish(self, file_id: str, n_bytes: int) -> bool:
        """A reservation has become a file of exactly so many bytes; False if there is none such."""
        query = "delete from unfinished where id = ? and bytes = ?"
        return self._database.execute(query, (file_id, n_bytes)).rowcount > 0

    def release(self, file_id: str) -> None:
        """A reservation is not needed any more, nor what was written under it."""
        query = "delete from unfinished where id = ? returning owner, bytes"
        row = self._database.execute(query, (file_id,)).fetchone()
        if row is not None:
            self.charge(row[0], -row[1])
        self.gone.append(file_id)

    def forget_dead(self) -> int:
        """Give up what dead processes had reserved; how many reservations that were."""
        own = "" if self._holder is None else self._holder.name
        query = "select holder, id from unfinished where holder not in ('', ?)"
        rows = self._database.execute(query, (own,)).fetchall()
        dead = {holder for holder in {row[0] for row in rows} if is_dead(self._holders, holder)}
        gone = [file_id for holder, file_id in rows if holder in dead]
        for file_id in gone:
            self.release(file_id)
        return len(gone)

    def _refusal(self, owner: str, n_bytes: int) -> StorageFull | None:
        limit = self._limits.owner
        if limit and self.used(owner) + n_bytes > limit:
            return StorageFull(
                "storage_quota_exceeded",
                f"The files and results of this key have {self.used(owner)} bytes; with {n_bytes} more they would pass"
                f" the {limit} that a key may have (--max-data-bytes-per-key): delete files that are not needed.",
            )
        limit = self._limits.whole
        if limit and self.used() + n_bytes > limit:
            return StorageFull(
                "storage_full",
                f"The server's files and results have no room for {n_bytes} bytes more: all keys together may have"
                f" {limit} (--max-data-bytes). Delete files that are not needed, or try again later.",
            )
        return None
