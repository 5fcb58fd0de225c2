"""Bugs to be caught: each is a small change of how batches are kept and run. A test of `batch_machine.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.serve.batch import attempt as batch_attempt
from quire.serve.batch import batches, files
from quire.serve.batch import end as batch_end
from quire.serve.batch import worker as batch_worker
from quire.serve.batch.attempt import Attempts
from quire.serve.batch.end import BatchEnd
from quire.serve.batch.outputs import ContentLost, Outputs
from quire.serve.batch.queue import LineQueue
from quire.serve.batch.schema import BatchRecord, fresh_id
from quire.serve.batch.space import Space
from quire.serve.batch.store import BatchStore, StoreThread
from quire.serve.batch.worker import BatchWorker
from quire.serve.http.refusal import Refusal, bad_request

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]


def wrap(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`."""
    patch.setattr(owner, name, make(getattr(owner, name)))


def a_look_and_a_deletion_are_two_transactions(patch: Patch) -> None:
    """As it was: a batch may be made between the two."""

    async def delete(state: Any, exchange: Any) -> None:
        store, owner, file_id = state.store, exchange.tenant.name, exchange.scope["path_params"]["file_id"]
        query = "select 1 from batches where input_file_id = ? and status in ('validating', 'in_progress')"
        record = await files._file(store, exchange)
        if await files.stored(store, lambda disk: disk._database.execute(query, (file_id,)).fetchone()):
            raise bad_request("in use", "file_id")

        def drop(disk: BatchStore) -> None:
            if disk._database.execute("delete from files where id = ?", (file_id,)).rowcount:
                disk.space.charge(owner, -record.bytes)
                disk.space.gone.append(file_id)

        await files.stored(store, drop)
        await exchange.respond_json({})

    patch.setattr(files, "serve_file_delete", delete)


def a_look_and_a_creation_are_two_transactions(patch: Patch) -> None:
    """As it was: the file may be deleted between the two."""

    async def create(state: Any, exchange: Any) -> None:
        body, owner = await state.read(exchange, batches._DECODER), exchange.tenant.name
        record = await files.stored(state.store, lambda disk: disk.file(owner, body.input_file_id))
        if record is None:
            raise Refusal(404, "none")
        batch = BatchRecord(
            id=fresh_id("batch_"), endpoint=body.endpoint, input_file_id=record.id, completion_window="24h",
            created_at=1, expires_at=1 << 40,
        )  # fmt: skip

        def add(disk: Any) -> None:
            disk.file = lambda *_: record
            try:
                disk.create_batch(owner, batch)
            finally:
                del disk.file

        await files.stored(state.store, add)
        await exchange.respond_json(batch)

    patch.setattr(batches, "serve_batch_create", create)


def a_lost_input_ends_the_worker(patch: Patch) -> None:
    def run(real: Any) -> Any:
        async def attempt(self: Attempts, line: Any) -> None:
            try:
                if line.is_whole_input:
                    await self._read_input(line)
                else:
                    await self._keep(line, await self._runner.output_of(line))
            except (ContentLost, FileNotFoundError):
                raise
            except Exception:
                await real(self, line)

        return attempt

    wrap(patch, Attempts, "run", run)


def room_is_read_once(patch: Patch) -> None:
    """As it was: each upload looks at the beginning how much room there is."""
    looked: dict[str, bool] = {}

    def reserve(real: Any) -> Any:
        def look(self: Space, file_id: str, owner: str, n_bytes: int) -> None:
            limits = self._limits
            if looked.setdefault(file_id, self._refusal(owner, n_bytes) is None):
                self._limits = type(limits)()
            try:
                real(self, file_id, owner, n_bytes)
            finally:
                self._limits = limits

        return look

    wrap(patch, Space, "reserve", reserve)


def results_are_not_counted(patch: Patch) -> None:
    def finish(real: Any) -> Any:
        def keep(self: LineQueue, owner: str, *rest: Any, **named: Any) -> None:
            charge, self._space.charge = self._space.charge, lambda *_: None  # type: ignore[method-assign]
            try:
                real(self, owner, *rest, **named)
            finally:
                self._space.charge = charge  # type: ignore[method-assign]

        return keep

    wrap(patch, LineQueue, "finish", finish)


def a_share_is_not_looked_at(patch: Patch) -> None:
    wrap(patch, Space, "__init__", lambda real: lambda self, d, f, limits: real(self, d, f, type(limits)(limits.whole)))


def a_full_disk_ends_the_worker(patch: Patch) -> None:
    patch.setattr(batch_attempt, "is_disk_trouble", lambda error: False)


def a_failed_upload_keeps_its_bytes(patch: Patch) -> None:
    async def discard(self: StoreThread, *_: str) -> None:
        return None

    patch.setattr(StoreThread, "discard", discard)


def uploads_of_the_dead_are_never_given_up(patch: Patch) -> None:
    patch.setattr(Space, "forget_dead", lambda self: 0)


def deaths_are_forgotten(patch: Patch) -> None:
    wrap(patch, LineQueue, "accuse", lambda real: lambda self: self.release())


def marks_stay_after_a_stop_in_order(patch: Patch) -> None:
    patch.setattr(BatchWorker, "_release_marks", lambda self, disk: None)


def the_first_death_convicts(patch: Patch) -> None:
    patch.setattr(batch_worker, "GUILTY_DEATHS", 0)


def suspects_run_side_by_side(patch: Patch) -> None:
    def mark(real: Any) -> Any:
        def suspect(self: LineQueue, paused: Any) -> Any:
            self._database.execute("update lines set state = 0 where state = 2")
            return None

        return suspect

    wrap(patch, LineQueue, "suspect", mark)


def a_line_that_was_put_back_runs_twice(patch: Patch) -> None:
    wrap(patch, LineQueue, "finish", lambda real: lambda self, owner, batch_id, number, output, *, is_error: (
        real(self, owner, batch_id, number, output, is_error=is_error),
        self._database.execute(
            "insert or ignore into lines (batch_id, line, offset, length, is_double)"
            " select ?, ?, 0, 1, 0 where ? % 5 = 4",
            (batch_id, number, number),
        ),
    ))  # fmt: skip


def results_are_dropped_before_they_are_written(patch: Patch) -> None:
    async def move(self: BatchEnd) -> bool:
        piece = await self._store.run(lambda disk: disk.outputs.next_piece(self._owner, self.batch_id))
        if piece is None:
            return False
        await self._store.run(lambda disk: disk.outputs.moved(self.batch_id, piece))
        for kind in piece.targets:
            await self._append(piece, kind)
        return True

    patch.setattr(BatchEnd, "_move", move)


def a_crash_leaves_a_piece_twice(patch: Patch) -> None:
    def append(path: Any, n_before: int, data: bytes) -> None:
        with path.open("ab") as content:
            content.write(data)

    patch.setattr(batch_end, "append", append)


def a_late_output_is_kept(patch: Patch) -> None:
    """Also when its batch has come to its end meanwhile."""

    def finish(real: Any) -> Any:
        def keep(self: LineQueue, owner: str, batch_id: str, number: int, output: bytes, *, is_error: bool) -> None:
            self._database.execute(
                "insert or ignore into lines (batch_id, line, offset, length, is_double) values (?, ?, 0, 1, 0)",
                (batch_id, number),
            )
            real(self, owner, batch_id, number, output, is_error=is_error)

        return keep

    wrap(patch, LineQueue, "finish", finish)
    patch.setattr(batch_worker, "_cancelled", lambda tasks: _nothing())


async def _nothing() -> None:
    return None


def a_byte_is_lost_on_the_way(patch: Patch) -> None:
    wrap(patch, Outputs, "next_piece", lambda real: lambda self, *rest: _shorter(real(self, *rest)))


def _shorter(piece: Any) -> Any:
    if piece is not None and len(piece.data) == 2:
        piece.data[True] = piece.data[True][:-1]
    return piece


def a_file_is_found_by_anybody(patch: Patch) -> None:
    patch.setattr(BatchStore, "file", lambda self, owner, file_id: next(self._files("where id = ?", file_id), None))


def a_deleted_file_keeps_its_bytes(patch: Patch) -> None:
    def delete(real: Any) -> Any:
        def forget(self: BatchStore, owner: str, file_id: str) -> bool:
            found = self.file(owner, file_id)
            done: bool = real(self, owner, file_id)
            if done and found is not None:
                self.space.charge(owner, found.bytes)
            return done

        return forget

    wrap(patch, BatchStore, "delete_file", delete)


def a_batch_without_room_goes_on(patch: Patch) -> None:
    async def fail(self: Attempts, batch_id: str, code: str, message: str) -> None:
        if code.startswith("storage_"):
            return
        await real_fail(self, batch_id, code, message)

    real_fail = Attempts.fail
    patch.setattr(Attempts, "fail", fail)


def an_expired_batch_forgets_lines(patch: Patch) -> None:
    async def fill(self: BatchEnd) -> None:
        return None

    patch.setattr(BatchEnd, "_fill", fill)


def a_record_comes_before_its_content(patch: Patch) -> None:
    """A file is unlinked although the deletion did not hold."""

    def delete(real: Any) -> Any:
        def forget(self: BatchStore, owner: str, file_id: str) -> bool:
            if self.file(owner, file_id) is not None:
                self._remove(file_id)
            return bool(real(self, owner, file_id))

        return forget

    wrap(patch, BatchStore, "delete_file", delete)


NO_BUGS = {"wrap", "_nothing", "_shorter"}
BUGS: list[Bug] = [
    value for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name not in NO_BUGS
]  # fmt: skip
