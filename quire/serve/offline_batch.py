"""`quire run-batch`: a file of requests in, a file of answers out, without a server. The same endpoints answer.

Owns the order of the output and how much is read ahead. Does not own what a line is (`batch_lines.py`).
Invariants: one output line for each input line that is not blank, in its order; of the file only the
ids of its lines stay in memory.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
from collections.abc import Callable, Coroutine
from typing import IO, Any

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineDead, EngineError
from quire.engine.async_llm import AsyncLLM
from quire.serve.app import App
from quire.serve.batch_lines import BatchLine, answered, custom_id_of, failed, read_line
from quire.serve.config import ServerConfig
from quire.serve.keys import NOBODY
from quire.serve.loopback import Reply, ask
from quire.serve.refusal import Refusal
from quire.serve.state import ServerState

WINDOW = 8
"""Lines read ahead, as a multiple of those that run: one long answer holds up no others."""
RETRY_S = 0.2

Load = Callable[[EngineConfig], Coroutine[Any, Any, AsyncLLM]]


@dataclasses.dataclass(slots=True)
class BatchSummary:
    """What became of a file."""

    n_answered: int = 0
    n_failed: int = 0


def run_batch(
    engine: EngineConfig, source: str, target: str, concurrency: int, load: Load = AsyncLLM.create
) -> BatchSummary:
    """Answer every line of `source` into `target`. Raises ConfigError when a file cannot be opened, EngineError when
    the engine is lost or the output cannot be written."""
    try:
        if os.path.exists(target) and os.path.samefile(source, target):
            raise ConfigError("the input file and the output file are the same")
        with open(source, "rb") as lines, open(target, "wb") as output:
            return asyncio.run(_run(engine, lines, output, concurrency, load))
    except OSError as error:
        where = error.filename or target
        kind = ConfigError if error.filename else EngineError
        raise kind(f"{where}: {error.strerror or error}") from None


async def _run(engine: EngineConfig, lines: IO[bytes], output: IO[bytes], concurrency: int, load: Load) -> BatchSummary:
    llm = await load(engine)
    state = ServerState(ServerConfig())
    state.attach(llm)
    try:
        return await _Batch(state, concurrency).run(lines, output)
    finally:
        state.close()
        await llm.shutdown()


class _Batch:
    """One file under way."""

    def __init__(self, state: ServerState, concurrency: int) -> None:
        self._state = state
        self._app = App(state)
        self._free = asyncio.Semaphore(concurrency)
        self._n_ahead = WINDOW * concurrency
        self._seen: set[str] = set()
        self._summary = BatchSummary()

    async def run(self, lines: IO[bytes], output: IO[bytes]) -> BatchSummary:
        waiting: collections.deque[asyncio.Task[tuple[bytes, bool]]] = collections.deque()
        try:
            while data := await asyncio.to_thread(lines.readline):
                if data.strip():
                    waiting.append(asyncio.create_task(self._line(data.rstrip(b"\r\n"))))
                while waiting and (len(waiting) >= self._n_ahead or waiting[0].done()):
                    await self._write(output, waiting.popleft())
            while waiting:
                await self._write(output, waiting.popleft())
        finally:
            for task in waiting:
                task.cancel()
        return self._summary

    async def _write(self, output: IO[bytes], task: asyncio.Task[tuple[bytes, bool]]) -> None:
        line, is_good = await task
        self._summary.n_answered += is_good
        self._summary.n_failed += not is_good
        await asyncio.to_thread(_put, output, line + b"\n")

    async def _line(self, data: bytes) -> tuple[bytes, bool]:
        """The output line, and whether it holds a good answer."""
        limit = self._state.config.max_body_bytes
        try:
            line = read_line(data, limit)
        except Refusal as refusal:
            return failed(custom_id_of(data, limit), refusal.code, refusal.message), False
        if line.custom_id in self._seen:
            return failed(line.custom_id, "duplicate_custom_id", "An earlier line has this custom_id."), False
        self._seen.add(line.custom_id)
        async with self._free:
            reply = await self._ask(line)
        return answered(line.custom_id, reply), reply.status == 200

    async def _ask(self, line: BatchLine) -> Reply:
        while True:
            reply = await ask(self._app.answer_inside, line.url, line.body, NOBODY)
            if not reply.is_busy:
                return reply
            failure = self._state.llm.failure()
            if failure is not None:
                raise EngineDead(failure)
            await asyncio.sleep(RETRY_S)


def _put(output: IO[bytes], data: bytes) -> None:
    output.write(data)
    output.flush()
