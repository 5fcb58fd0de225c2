"""Threads for work that would keep the event loop from others: bodies have theirs, texts have theirs.

Owns when work goes to a thread, how much of it waits, and that large ones take turns. Does not own the work.
Invariants: short work is done at once; at most `MAX_PENDING` long ones of a kind wait, more are refused with 429; one
large work runs at a time, whatever its kind, so that the event loop has its turn between any two calls that keep the
interpreter, and smaller ones have a thread left.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import TypeVar

from quire.core.errors import QueueFull
from quire.serve.http.refusal import Refusal

T = TypeVar("T")

SHORT_BODY_BYTES = 16 * 1024
"""Shorter bodies are decoded and checked at once: that takes a millisecond or two at most."""
LARGE_BYTES = 256 * 1024
"""Bodies and texts from this size on are dealt with one at a time."""
N_THREADS = 2
MAX_PENDING = 256
TIME_LIMIT_S = 30.0


class LargeWorkLock:
    """Lets one large work run at a time in all threads of a process."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def of(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Within it a work of `size` bytes or characters is the only large one that runs."""
        return self._lock if size > LARGE_BYTES else contextlib.nullcontext()


class WorkThreads:
    """The threads for one kind of work."""

    def __init__(self, name: str, lock: LargeWorkLock) -> None:
        """name: of the threads."""
        self._pool = concurrent.futures.ThreadPoolExecutor(N_THREADS, thread_name_prefix=name)
        self._large_work = lock
        self._n_pending = 0

    def close(self) -> None:
        """Drop waiting work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T], size: int, short: int, param: str | None = None) -> T:
        """What `work` makes of `size` bytes or characters: at once up to a size of `short`, else in a thread. Raises
        what it raises, QueueFull when work piles up, and a 400 Refusal that names `param` when it takes too long."""
        if size <= short:
            return work()
        if self._n_pending >= MAX_PENDING:
            raise QueueFull(f"{self._n_pending} long texts wait to be read or tokenized: try again later")
        self._n_pending += 1
        try:
            async with self._large_work.of(size), asyncio.timeout(TIME_LIMIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            message = f"{param or 'The body'} took longer than {TIME_LIMIT_S:g} s to process."
            raise Refusal(400, message, param=param, code="timeout") from None
        finally:
            self._n_pending -= 1
