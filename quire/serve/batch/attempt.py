"""One attempt at a line, or at reading an input, and what comes of it: an output, another try, or the batch's end.

Owns what each exception means. Does not own whose turn it is. Invariants: what a line raises ends this line or its
batch and nothing else; every attempt leaves the line with an output, back in the queue, or in a batch that ends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from typing import TypeVar

from quire.serve.batch.end import INPUT_LOST
from quire.serve.batch.outputs import ContentLost
from quire.serve.batch.queue import Line
from quire.serve.batch.runner import QUARANTINED, Busy, LineRunner, Output
from quire.serve.batch.scan import MAX_LINES, SOME_BYTES, InputScan
from quire.serve.batch.schema import DAMAGED
from quire.serve.batch.space import StorageFull
from quire.serve.batch.store import BatchStore, StoreDamaged, StoreThread, is_disk_trouble

logger = logging.getLogger("quire.batch")

T = TypeVar("T")

DISK_RETRY_S = 5.0
DROP_LINES = 2000
MAX_TRIES = 5
"""Times that an input which the disk refuses is tried, `DISK_RETRY_S` apart."""
BLAMED = "The server failed at this line."


class Pauses:
    """Who has to wait, and until when."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def hold(self, name: str, seconds: float) -> None:
        """Let one wait from now on."""
        self._until_s[name] = asyncio.get_running_loop().time() + seconds

    def left_s(self, name: str) -> float:
        """Seconds; 0 if it need not wait."""
        left_s = self._until_s.get(name, 0.0) - asyncio.get_running_loop().time()
        if left_s <= 0:
            self._until_s.pop(name, None)
        return max(0.0, left_s)

    def all(self) -> set[str]:
        """Who has to wait."""
        return {name for name in list(self._until_s) if self.left_s(name)}


class Attempts:
    """Tries lines, and keeps what comes of it."""

    def __init__(
        self, store: StoreThread, runner: LineRunner, max_line_bytes: int, is_engine_well: Callable[[], bool]
    ) -> None:
        self._store = store
        self._is_engine_well = is_engine_well
        self._runner = runner
        self._max_line_bytes = max_line_bytes
        self._tries: collections.Counter[str] = collections.Counter()
        self.owners = Pauses()
        """Of owners, for reasons of their own."""
        self.all_until_s = 0.0
        """The server has no room for anybody's lines until then, on the loop's clock."""
        self.has_ended = False
        """True once a batch has begun its end; set back by whoever looks."""

    async def stored(self, work: Callable[[BatchStore], T]) -> T:
        """Result of `work`, tried again for as long as the disk refuses."""
        while True:
            try:
                return await self._store.run(work)
            except (sqlite3.Error, OSError) as error:
                if not is_disk_trouble(error):
                    raise
                logger.warning("the data folder refuses, batches wait: %s", error)
                await asyncio.sleep(DISK_RETRY_S)

    async def fail(self, batch_id: str, code: str, message: str) -> None:
        """Take a batch to its end for this reason."""
        logger.warning("batch %s fails: %s", batch_id, message)
        await self.stored(lambda disk: disk.begin_end(batch_id, "failed", code, message))
        self.has_ended = True

    async def run(self, line: Line) -> None:
        """Raises StoreDamaged, and what keeping an output or failing a batch raises against all expectation."""
        try:
            if not line.endpoint:
                await self.fail(line.batch_id, "record_damaged", DAMAGED)
            elif line.is_whole_input:
                await self._read_input(line)
            else:
                await self._keep(line, await self._runner.output_of(line))
            self._tries.pop(line.batch_id, None)
        except Busy as busy:
            if busy.is_own:
                self.owners.hold(line.owner, busy.wait_s)
            else:
                self.all_until_s = asyncio.get_running_loop().time() + busy.wait_s
            while not self._is_engine_well():  # perhaps for good, because of this line: it keeps its mark until then
                await asyncio.sleep(busy.wait_s)
            await self.stored(lambda disk: disk.lines.put_back(line))
        except StorageFull as full:
            await self.fail(line.batch_id, full.code, full.message)
        except ContentLost as error:
            logger.error("%s", error)
            await self.fail(line.batch_id, "input_file_lost", INPUT_LOST)
        except OSError as error:
            await self._try_again(line, error)
        except StoreDamaged:
            raise
        except Exception:
            logger.exception("line %d of batch %s failed", line.number + 1, line.batch_id)
            await self._blame(line)

    async def convict(self, line: Line) -> None:
        """An error for a line of which processes have died too often."""
        number = line.number + 1
        logger.error(
            "%d processes have died of line %d of batch %s: it runs no more", line.deaths, number, line.batch_id
        )
        if line.is_whole_input:
            await self.fail(line.batch_id, "request_quarantined", QUARANTINED.format(line.deaths))
        else:
            await self._keep_or_fail(line, await self._runner.quarantined(line))

    async def _keep(self, line: Line, output: Output) -> None:
        def keep(disk: BatchStore) -> bool:
            disk.lines.finish(line.owner, line.batch_id, line.number, output.data, is_error=output.is_error)
            return disk.end_if_done(line.batch_id)

        self.has_ended |= await self.stored(keep)

    async def _keep_or_fail(self, line: Line, output: Output) -> None:
        try:
            await self._keep(line, output)
        except StorageFull as full:
            await self.fail(line.batch_id, full.code, full.message)

    async def _read_input(self, line: Line) -> None:
        batch_id = line.batch_id
        while await self.stored(lambda disk: disk.lines.drop(batch_id, DROP_LINES, least=0)):
            pass  # lines of a reading that was cut short
        path = self._store.store.content_path(line.input_file_id)
        scan = await self._store.aside(lambda: InputScan(path, line.length, self._max_line_bytes))
        with contextlib.closing(scan):
            while not scan.is_done:
                found = await self._runner.aside(scan.some, SOME_BYTES)
                await self.stored(lambda disk, found=found: disk.lines.add_lines(batch_id, found))  # type: ignore[misc]
        if 0 < scan.n_lines <= MAX_LINES:
            self.has_ended |= await self.stored(lambda disk: disk.begin_work(batch_id, scan.n_lines))
        else:
            message = f"The input has {scan.n_lines} lines: it must have 1 to {MAX_LINES}."
            await self.fail(batch_id, "invalid_input", message)

    async def _try_again(self, line: Line, error: OSError) -> None:
        """The disk may recover: the owner waits a little, and a batch that has waited too often fails."""
        logger.warning("the input of batch %s cannot be read: %s", line.batch_id, error)
        if not self.owners.left_s(line.owner):  # of many lines that fail at once one counts
            self._tries[line.batch_id] += 1
        if self._tries[line.batch_id] >= MAX_TRIES:
            message = f"The content of the input file cannot be read from the server's disk: {error.strerror}."
            await self.fail(line.batch_id, "input_file_unreadable", message)
        else:
            self.owners.hold(line.owner, DISK_RETRY_S)
            await self.stored(lambda disk: disk.lines.put_back(line))

    async def _blame(self, line: Line) -> None:
        """A line by which a fault of ours came to light is an error."""
        if line.is_whole_input:
            await self.fail(line.batch_id, "internal_error", BLAMED)
        else:
            await self._keep_or_fail(line, await self._runner.failed(line, "internal_error", BLAMED))
