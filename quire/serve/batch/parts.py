"""A batch file in parts, for several engines: where each part lies, and the work of one engine on them.

Owns how a file is cut. Does not own lines (`lines.py`), nor who works on which part (`engine/replicas/ray.py`).
Invariant: parts end with lines, and together they are the file; a line is told of an equal id before it, in whatever
part that stands.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
from collections.abc import AsyncIterator, Iterator
from typing import IO, Any, Final

import msgspec

from quire.config.engine import EngineConfig
from quire.core.files import open_regular
from quire.engine.async_llm import AsyncLLM
from quire.serve.batch.lines import mark_of, read_line
from quire.serve.batch.offline import READ_BYTES, Batch
from quire.serve.config import ServerConfig
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import Refusal
from quire.serve.state import ServerState

PART_LINES: Final = 64
PART_BYTES: Final = 1 << 20


class Part(msgspec.Struct, frozen=True):
    """Some lines of the input."""

    start: int
    """Of its first byte."""
    n_bytes: int
    first_line: int
    """Number of its first line in the file, from 0."""
    repeated: dict[int, int]
    """Numbers in the file of its lines whose ids stand before them → of the line that has the id first."""


def cut(lines: IO[bytes], max_line_bytes: int) -> Iterator[Part]:
    """The parts of a file, in their order."""
    seen: dict[bytes, int] = {}
    start = first = n_bytes = n_lines = 0
    repeated: dict[int, int] = {}
    while data := lines.readline(max_line_bytes + 1):
        n_bytes += len(data)
        mark = _mark(data, max_line_bytes)
        if mark is not None and seen.setdefault(mark, first + n_lines) != first + n_lines:
            repeated[first + n_lines] = seen[mark]
        while not data.endswith(b"\n") and (data := lines.readline(READ_BYTES)):
            n_bytes += len(data)
        n_lines += 1
        if n_lines == PART_LINES or n_bytes >= PART_BYTES:
            yield Part(start, n_bytes, first, repeated)
            start, first, n_bytes, n_lines, repeated = start + n_bytes, first + n_lines, 0, 0, {}
    if n_bytes:
        yield Part(start, n_bytes, first, repeated)


def _mark(data: bytes, max_line_bytes: int) -> bytes | None:
    """Of a good line's id."""
    try:
        return mark_of(read_line(data.rstrip(b"\r\n"), max_line_bytes, IgnoredParams()).custom_id)
    except Refusal:
        return None


class PartWorker:
    """One engine that answers parts of a file, as many at once as are asked of it. Made where the engine is to run."""

    def __init__(self, engine: bytes, source: str, concurrency: int) -> None:
        """engine: an EngineConfig as JSON; source: the input, by a path that is good here."""
        self._engine = msgspec.json.decode(engine, type=EngineConfig)
        self._source = source
        self._concurrency = concurrency
        self._batch: Batch | None = None
        self._loading = asyncio.Lock()

    async def __call__(self, row: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """`part`: a Part as JSON. Gives `output`, its lines, how many were answered or failed, and the first reason."""
        batch = await self._loaded()
        part = msgspec.json.decode(row["part"], type=Part)
        data = await asyncio.to_thread(self._read, part)
        output = io.BytesIO()
        summary = await batch.run(io.BytesIO(data), output, part.first_line, part.repeated)
        yield {"output": output.getvalue(), **dataclasses.asdict(summary)}

    async def _loaded(self) -> Batch:
        async with self._loading:
            if self._batch is None:
                llm = await AsyncLLM.create(self._engine)
                state = ServerState(ServerConfig())
                state.attach(llm)
                self._batch = Batch(state, self._concurrency)
        return self._batch

    def _read(self, part: Part) -> bytes:
        with os.fdopen(open_regular(self._source), "rb") as lines:
            lines.seek(part.start)
            return lines.read(part.n_bytes)
