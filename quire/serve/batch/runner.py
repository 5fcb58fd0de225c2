"""One line of a batch from its bytes to its output. Owns reading, asking and wording; not whose turn it is.

Invariants: a line is read when it runs and not before; work that grows with a line's length is done in a thread; an
output says what became of the line, and is made once.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TypeVar

from quire.serve.batch.lines import BatchLine, answered, custom_id_of, double_problem, failed, read_line, too_long
from quire.serve.batch.outputs import ContentLost
from quire.serve.batch.queue import Line, ScannedLine
from quire.serve.batch.scan import read_at
from quire.serve.batch.schema import fresh_id
from quire.serve.batch.store import StoreThread
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.loopback import LoopbackReply, Run, ask
from quire.serve.http.refusal import Refusal, bad_request
from quire.serve.http.threads import SHORT_BODY_BYTES
from quire.serve.state import ServerState

T = TypeVar("T")

RETRY_S = 0.5
QUARANTINED = (
    "The server's process ended {} times while it ran this request and no other line of a batch: it is not run again."
)


class Busy(Exception):
    """The server has no room for this line now."""

    def __init__(self, wait_s: float, is_own: bool) -> None:
        """wait_s: time to wait; is_own: only the line's owner has to."""
        super().__init__()
        self.wait_s = wait_s
        self.is_own = is_own


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A line of output without its line end."""

    data: bytes
    is_error: bool


class LineRunner:
    """Answers lines through `run`, which answers a request to this server."""

    def __init__(self, state: ServerState, run: Run, store: StoreThread) -> None:
        self._state = state
        self._run = run
        self._store = store

    async def output_of(self, line: Line) -> Output:
        """Raises Busy, and ContentLost or OSError when the input cannot be read."""
        path, max_bytes = self._store.store.content_path(line.input_file_id), self._state.config.max_body_bytes
        ignored = IgnoredParams()
        ignored.is_strict = self._state.config.strict
        found = await self.aside(lambda: _read(path, line, max_bytes, ignored), line.length)
        self._state.note_ignored(ignored)
        if isinstance(found, Output):
            return found
        tenant = self._state.keys.named(line.owner)
        if tenant is None:
            message = "The API key that made this batch is not known any more."
            return Output(failed(found.custom_id, "invalid_api_key", message), True)
        reply = await ask(self._run, found.url, found.body, tenant)
        if reply.is_busy:
            raise Busy(max(RETRY_S, reply.retry_after_s if reply.is_tenants_own else 0), reply.is_tenants_own)
        if len(reply.body) <= SHORT_BODY_BYTES:
            return _answered(found, reply)
        return await self.aside(lambda: _answered(found, reply), len(reply.body))

    async def aside(self, work: Callable[[], T], n_bytes: int) -> T:
        """Result of `work` on `n_bytes` of input or output, in a thread. Large ones have their turn among those of
        requests: several that keep the interpreter at once would hold the event loop up for as long as all together."""
        async with self._state.large_work_lock.of(n_bytes):
            return await self._store.aside(work)

    async def failed(self, line: Line, code: str, message: str) -> Output:
        """The output of a line that cannot be run. Raises nothing for an input that cannot be read."""
        return (await self.all_failed(line.input_file_id, [(line.offset, line.length)], code, message))[0]

    async def all_failed(
        self, input_file_id: str, places: list[tuple[int, int]], code: str, message: str, *, must_read: bool = False
    ) -> list[Output]:
        """The same for several lines, given as (offset, length). must_read: ContentLost or OSError if it cannot be."""
        path, max_bytes = self._store.store.content_path(input_file_id), self._state.config.max_body_bytes

        def make() -> list[Output]:
            return [
                Output(failed(_name(path, offset, length, max_bytes, must_read), code, message), True)
                for offset, length in places
            ]

        return await self._store.aside(make)

    async def quarantined(self, line: Line) -> Output:
        """The output of a line of which processes have died: that of a request that was refused."""
        path, max_bytes = self._store.store.content_path(line.input_file_id), self._state.config.max_body_bytes
        name = await self.aside(lambda: _name(path, line.offset, line.length, max_bytes, False), line.length)
        refusal = bad_request(QUARANTINED.format(line.deaths), code="request_quarantined")
        return Output(answered(name, LoopbackReply(refusal.status, fresh_id("req_"), refusal.body())), True)


def places(lines: list[ScannedLine]) -> list[tuple[int, int]]:
    """Where lines are, as (offset, length)."""
    return [(line.offset, line.length) for line in lines]


def _read(path: pathlib.Path, line: Line, max_bytes: int, ignored: IgnoredParams) -> BatchLine | Output:
    """The line if it is good, else its output."""
    data = b""
    try:
        if line.length > max_bytes:
            raise too_long(max_bytes)
        data = read_at(path, line.offset, line.length)
        found = read_line(data, max_bytes, ignored, line.endpoint)
    except Refusal as refusal:
        return Output(failed(custom_id_of(data, max_bytes), refusal.code, refusal.message), True)
    if line.double:
        return Output(failed(found.custom_id, "duplicate_custom_id", double_problem(line.number, line.first)), True)
    return found


def _name(path: pathlib.Path, offset: int, length: int, max_bytes: int, must_read: bool) -> str | None:
    if length > max_bytes:
        return None
    try:
        return custom_id_of(read_at(path, offset, length), max_bytes)
    except (ContentLost, OSError):
        if must_read:
            raise
        return None


def _answered(line: BatchLine, reply: LoopbackReply) -> Output:
    return Output(answered(line.custom_id, reply), reply.status != 200)
