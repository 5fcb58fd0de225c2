"""`quire run-batch`: a file of requests in, a file of answers out, without a server. The same endpoints answer.

Owns the order of the output and how much is read ahead. Does not own what a line is (`lines.py`).
Invariants: one output line for each input line that is not blank, in its order; what is read and not written is
bounded in bytes; of the rest of the file only marks of the lines' ids stay in memory.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import MappingProxyType
from typing import IO, Any

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineDead, EngineError
from quire.core.files import open_output, open_regular
from quire.engine.async_llm import AsyncLLM
from quire.serve.app import App
from quire.serve.batch.lines import (
    BatchLine,
    answered,
    custom_id_of,
    double_problem,
    failed,
    mark_of,
    read_line,
    reason_of,
)
from quire.serve.config import ServerConfig
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.keys import NOBODY
from quire.serve.http.loopback import LoopbackReply, ask
from quire.serve.http.refusal import Refusal
from quire.serve.http.threads import SHORT_BODY_BYTES
from quire.serve.state import ServerState

NONE_REPEATED: Mapping[int, int] = MappingProxyType({})
WINDOW = 8
"""Lines read ahead, as a multiple of those that run: one long answer holds up no others."""
MAX_AHEAD_BYTES = 64 << 20
"""Of lines that were read and answers that were not written. One line alone may have more."""
READ_LINES = 64
READ_BYTES = 1 << 20
"""Read at once."""
RETRY_S = 0.2

Load = Callable[[EngineConfig], Coroutine[Any, Any, AsyncLLM]]


@dataclasses.dataclass(slots=True)
class BatchSummary:
    """What became of a file."""

    n_answered: int = 0
    n_failed: int = 0
    first_reason: str = ""
    """Which line failed first, and why; empty: none did."""

    def count(self, n_answered: int, n_failed: int, reason: str) -> None:
        """Some more lines. reason: the first one among them."""
        self.n_answered += n_answered
        self.n_failed += n_failed
        self.first_reason = self.first_reason or reason


def run_batch(
    engine: EngineConfig, source: str, target: str, concurrency: int, load: Load = AsyncLLM.create
) -> BatchSummary:
    """Answer every line of `source` into `target`. Raises ConfigError when a file cannot be opened, EngineError when
    the engine is lost or the output cannot be written."""
    with (
        told_errors(source, target),
        os.fdopen(open_regular(source), "rb") as lines,
        output_file(target) as output,
    ):
        return asyncio.run(_run(engine, lines, output, concurrency, load))


@contextlib.contextmanager
def told_errors(source: str, target: str) -> Iterator[None]:
    """Errors of files in words; ConfigError at once if both are one."""
    try:
        if os.path.exists(target) and os.path.samefile(source, target):
            raise ConfigError("the input file and the output file are the same")
        yield
    except OSError as error:
        where = error.filename or target
        kind = ConfigError if error.filename else EngineError
        raise kind(f"{where}: {error.strerror or error}") from None


async def _run(engine: EngineConfig, lines: IO[bytes], output: IO[bytes], concurrency: int, load: Load) -> BatchSummary:
    llm = await load(engine)
    state = ServerState(ServerConfig())
    state.attach(llm)
    try:
        return await Batch(state, concurrency).run(lines, output)
    finally:
        state.close()
        await llm.shutdown()


class _Reader:
    """The lines of the input, in their order, as requests or as the outputs of those that cannot be asked. For a thread
    of its own: reading and decoding take long where lines are."""

    def __init__(
        self, lines: IO[bytes], max_line_bytes: int, first_line: int = 0, repeated: Mapping[int, int] = NONE_REPEATED
    ) -> None:
        self._lines = lines
        self._max_line_bytes = max_line_bytes
        self._repeated = repeated
        self._number = first_line - 1
        """Of the line that was read last."""
        self._seen: dict[bytes, int] = {}
        """Mark of an id → number of the line that has it first."""
        self.is_done = False

    def some(self, n_most: int, most_bytes: int) -> list[BatchLine | bytes]:
        """The next lines that are not blank: one at least, if there is one, then as many as these limits allow."""
        found: list[BatchLine | bytes] = []
        n_bytes = 0
        while len(found) < n_most and (not found or n_bytes < most_bytes):
            data = self._lines.readline(self._max_line_bytes + 1)
            if not data:
                self.is_done = True
                break
            n_bytes += len(data)
            self._number += 1
            if data.strip() or not data.endswith(b"\n"):
                found += self._made(data)
        return found

    def _made(self, data: bytes) -> list[BatchLine | bytes]:
        is_blank = not data.strip()
        while not data.endswith(b"\n") and (rest := self._lines.readline(READ_BYTES)):
            is_blank &= not rest.strip()
            data = data[: self._max_line_bytes + 1] + rest  # too long by now: only that it is so is still told
        if is_blank:
            return []
        data = data.rstrip(b"\r\n")
        try:
            line = read_line(data, self._max_line_bytes, IgnoredParams())
        except Refusal as refusal:
            message = f"line {self._number + 1}: {refusal.message}"
            return [failed(custom_id_of(data, self._max_line_bytes), refusal.code, message)]
        mark = mark_of(line.custom_id)
        first = self._repeated.get(self._number, self._seen.setdefault(mark, self._number))
        if first != self._number:
            return [failed(line.custom_id, "duplicate_custom_id", double_problem(self._number, first))]
        return [line]


class Batch:
    """A file under way, or parts of one at once."""

    def __init__(self, state: ServerState, concurrency: int) -> None:
        """concurrency: most requests of all parts that are given to the engine at once."""
        self._state = state
        self._app = App(state)
        self._free = asyncio.Semaphore(concurrency)
        self._n_ahead = WINDOW * concurrency
        self._held_bytes = 0
        """Of lines that are not answered, and of answers that are not written."""

    async def run(
        self, lines: IO[bytes], output: IO[bytes], first_line: int = 0, repeated: Mapping[int, int] = NONE_REPEATED
    ) -> BatchSummary:
        """Answer `lines` into `output`. first_line: its number in the file, from 0. repeated: numbers there of lines
        whose ids stand before them → of the line that has the id first; within `lines` that is found here."""
        reader = _Reader(lines, self._state.config.max_body_bytes, first_line, repeated)
        summary = BatchSummary()
        waiting: collections.deque[asyncio.Task[tuple[bytes, bool]]] = collections.deque()
        try:
            while waiting or not reader.is_done:
                n_free, free_bytes = self._n_ahead - len(waiting), MAX_AHEAD_BYTES - self._held_bytes
                if not reader.is_done and (not waiting or (n_free > 0 and free_bytes > 0)):
                    limits = min(n_free, READ_LINES), min(free_bytes, READ_BYTES)
                    for line in await asyncio.to_thread(reader.some, *limits):
                        waiting.append(asyncio.create_task(self._line(line)))
                        self._held_bytes += len(line if isinstance(line, bytes) else line.body)
                elif waiting:
                    await self._write(output, waiting.popleft(), summary)
                while waiting and waiting[0].done():
                    await self._write(output, waiting.popleft(), summary)
        finally:
            for task in waiting:
                task.cancel()
        return summary

    async def _write(self, output: IO[bytes], task: asyncio.Task[tuple[bytes, bool]], summary: BatchSummary) -> None:
        line, is_good = await task
        summary.count(is_good, not is_good, "" if is_good or summary.first_reason else reason_of(line))
        await asyncio.to_thread(_put, output, line + b"\n")
        self._held_bytes -= len(line)

    async def _line(self, line: BatchLine | bytes) -> tuple[bytes, bool]:
        """The output line, and whether it holds a good answer."""
        if isinstance(line, bytes):
            return line, False
        async with self._free:
            reply = await self._ask(line)
        if len(reply.body) <= SHORT_BODY_BYTES:
            found = answered(line.custom_id, reply)
        else:
            found = await asyncio.to_thread(answered, line.custom_id, reply)
        self._held_bytes += len(found) - len(line.body)
        return found, reply.status == 200

    async def _ask(self, line: BatchLine) -> LoopbackReply:
        while True:
            reply = await ask(self._app.answer_inside, line.url, line.body, NOBODY)
            if not reply.is_busy:
                return reply
            failure = self._state.llm.failure()
            if failure is not None:
                raise EngineDead(failure)
            await asyncio.sleep(RETRY_S)


def output_file(target: str) -> IO[bytes]:
    """`target`, empty."""
    return os.fdopen(open_output(target, os.O_CREAT | os.O_TRUNC), "wb")


def _put(output: IO[bytes], data: bytes) -> None:
    output.write(data)
    output.flush()
