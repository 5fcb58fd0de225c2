"""The way of a batch to its end: errors for lines that never ran, results into files, the record closed.

Owns the order of these steps. Each is done bit by bit, so that no other batch waits long, and may be cut short
anywhere: the next start goes on where it was. Invariant: what a batch has done is in its files, whatever its end.
"""

from __future__ import annotations

import logging

from quire.serve.batch.outputs import ContentLost, ResultPiece, append
from quire.serve.batch.runner import LineRunner, places
from quire.serve.batch.space import StorageFull
from quire.serve.batch.store import BatchStore, StoreThread

logger = logging.getLogger("quire.batch")

FILL_LINES = 256
DROP_LINES = 2000
EXPIRED = "This request could not be executed before the completion window expired."
INPUT_LOST = "The content of the input file is not on the server's disk any more: upload it again, make a new batch."
OUTPUT_LOST = "Outputs of this batch were lost from the server's disk: make a new batch of the lines that are missing."


class BatchEnd:
    """One batch that is being taken to its end. Raises sqlite3.Error or OSError when the disk refuses."""

    def __init__(self, store: StoreThread, runner: LineRunner, owner: str, batch_id: str, input_file_id: str) -> None:
        self._store = store
        self._runner = runner
        self._owner = owner
        self.batch_id = batch_id
        self._input_file_id = input_file_id

    async def reach(self, ending: str) -> str:
        """Do all that is left; the status in which the batch has ended. No line of it may run any more."""
        if ending == "expired":
            try:
                await self._fill()
            except StorageFull as full:
                await self._fail(full.code, full.message)
            except ContentLost:
                await self._fail("input_file_lost", INPUT_LOST)
        while await self._store.run(lambda disk: disk.lines.drop(self.batch_id, DROP_LINES)):
            pass
        while await self._move():
            pass
        return await self._close()

    async def give_up(self, code: str, message: str) -> str:
        """End the batch as failed, without what is not in its files yet."""
        await self._fail(code, message)
        while await self._store.run(lambda disk: disk.lines.drop(self.batch_id, DROP_LINES)):
            pass
        await self._store.run(lambda disk: disk.outputs.forget(self._owner, self.batch_id))
        return await self._close()

    async def _close(self) -> str:
        status = await self._store.run(lambda disk: disk.end_batch(self._owner, self.batch_id))
        logger.info("batch %s is %s", self.batch_id, status)
        return status

    async def _fail(self, code: str, message: str) -> None:
        await self._store.run(lambda disk: disk.begin_end(self.batch_id, "failed", code, message))

    async def _fill(self) -> None:
        """An error for every line that has no output."""
        while left := await self._store.run(lambda disk: disk.lines.left(self.batch_id, FILL_LINES)):
            outputs = await self._runner.all_failed(
                self._input_file_id, places(left), "batch_expired", EXPIRED, must_read=True
            )
            await self._keep([(line.number, output.data) for line, output in zip(left, outputs, strict=True)])

    async def _keep(self, errors: list[tuple[int, bytes]]) -> None:
        def keep(disk: BatchStore) -> None:
            for number, output in errors:
                disk.lines.finish(self._owner, self.batch_id, number, output, is_error=True)

        await self._store.run(keep)

    async def _move(self) -> bool:
        """Some results into their files; False when all are there."""
        piece = await self._store.run(lambda disk: disk.outputs.next_piece(self._owner, self.batch_id))
        if piece is None:
            return False
        for kind in piece.targets:
            try:
                await self._append(piece, kind)
            except ContentLost as error:
                logger.error("outputs of batch %s are lost: %s", self.batch_id, error)
                await self._lose(piece, kind)
                return True
        await self._store.run(lambda disk: disk.outputs.moved(self.batch_id, piece))
        await self._store.run(lambda disk: disk.outputs.shorten())
        return True

    async def _append(self, piece: ResultPiece, kind: bool) -> None:
        file_id, n_before = piece.targets[kind]
        path = self._store.store.content_path(file_id)
        await self._store.aside(lambda: append(path, n_before, piece.data[kind]))

    async def _lose(self, piece: ResultPiece, kind: bool) -> None:
        await self._store.run(lambda disk: disk.outputs.lost(self._owner, piece, kind))
        await self._fail("output_file_lost", OUTPUT_LOST)
