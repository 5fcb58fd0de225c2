"""Large answers, made beside the event loop a few milliseconds at a time and written as they come.

Owns the one thread that lays them out. Does not own how they look (`openai/chat.py`, ...) nor how a value is
cut (`json_pieces.py`), nor clients that do not read (`transport.py`). Invariants: no more of an answer is held as text
than a few slices, however slowly it is read; slices of several answers take turns.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from quire.serve.http.exchange import JSON, Exchange
from quire.serve.http.json_pieces import json_pieces

SLICE_S = 0.003
SLICE_BYTES = 256 * 1024
"""A slice ends where it took so long or became so large."""


class AnswerMaker:
    """See the module."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="quire-answers")

    def close(self) -> None:
        """Drop waiting work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def slices(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces, joined into slices. Each is made when it is asked for."""
        loop, is_last = asyncio.get_running_loop(), False
        while not is_last:
            data, is_last = await loop.run_in_executor(self._thread, _slice, pieces)
            yield data

    async def respond_json(self, exchange: Exchange, value: Any) -> None:
        """200 with a large JSON value."""
        slices = self.slices(json_pieces(value))
        first = await anext(slices)
        second = await anext(slices, None)
        if second is None:
            await exchange.respond(200, first)
            return
        await exchange.start(200, JSON, [(b"x-content-type-options", b"nosniff")])
        await exchange.write(first)
        await exchange.write(second)
        async for data in slices:
            await exchange.write(data)
        await exchange.write(b"", more=False)


def _slice(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """The next pieces, and whether they are the last."""
    end_s, n_bytes, found = time.perf_counter() + SLICE_S, 0, []
    for piece in pieces:
        found.append(piece)
        n_bytes += len(piece)
        if n_bytes >= SLICE_BYTES or time.perf_counter() >= end_s:
            return b"".join(found), False
    return b"".join(found), True
