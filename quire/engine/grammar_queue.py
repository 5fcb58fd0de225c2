"""Compiling grammars beside the event loop, within a time limit and a bounded queue. Owns the threads for it."""

from __future__ import annotations

import asyncio
import concurrent.futures

from quire.core.errors import QueueFull
from quire.core.sampling import SamplingParams
from quire.engine.intake import Intake
from quire.text.grammar import refused

N_THREADS = 2
MAX_PENDING = 64
TIME_LIMIT_S = 10.0
"""With what waits before it in the queue. A compilation takes about a second at most, by its fuel."""


class GrammarQueue:
    """Of one process; for one event loop."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._n_pending = 0

    async def checked(self, params: SamplingParams) -> str:
        """`Intake.check_grammar` in a thread. Raises what it raises, and QueueFull when grammars pile up."""
        if self._n_pending >= MAX_PENDING:
            raise QueueFull(f"{self._n_pending} grammars wait to be compiled: try again later")
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(N_THREADS, thread_name_prefix="quire-grammar")
        work = self._pool.submit(self._intake.check_grammar, params)
        self._n_pending += 1
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            raise refused(f"it took longer than {TIME_LIMIT_S:g} s to compile") from None
        finally:
            self._n_pending -= 1

    def close(self) -> None:
        """Drop what waits."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
