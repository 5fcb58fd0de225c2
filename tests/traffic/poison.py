"""Memory that nobody may read is filled with what would be noticed: NaN in pages, wrong tokens and page 0 in tables.

Everything is queued behind the steps in flight (one stream on CUDA, one thread on CPU), which may still read what
control has already given up; the steps that are planned later come after.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

import torch

from quire.engine.core import EngineCore
from quire.engine.executors.inline import ThreadExecutor


class Poison:
    """For one engine of `build_engine`."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        runner = core.executor.worker.runner
        self.pool, self.tables = runner.pool, runner.tables
        self._queued: list[concurrent.futures.Future[None]] = []

    def everything(self) -> None:
        """Before the first request: all pages, page 0 included, and the rows of all slots."""
        self._apply(list(range(self.pool.k.shape[1])), list(range(self.tables.tokens.shape[0])))

    def unowned(self) -> None:
        """Pages that no sequence and no cache owns, page 0, and the rows of free slots."""
        live = self._core.scheduler.live
        refs = live.cache.pool.refs
        self._apply([page for page, count in enumerate(refs) if not count], list(live.free_slots[0]))

    def write(self, page: int, value: float) -> None:
        """Overwrite one page, owned or not: for tests of the judge."""
        self._queue(lambda: self._fill([page], value))

    def _apply(self, pages: list[int], slots: list[int]) -> None:
        self._queue(lambda: self._fill(pages, float("nan")))
        self._queue(lambda: self._spoil(slots))

    def _fill(self, pages: list[int], value: float) -> None:
        where = torch.tensor(pages, device=self.pool.k.device)
        self.pool.k.index_fill_(1, where, value)
        self.pool.v.index_fill_(1, where, value)

    def _spoil(self, slots: list[int]) -> None:
        where = torch.tensor(slots, dtype=torch.int64, device=self.tables.tokens.device)
        self.tables.tokens.index_fill_(0, where, 7)  # an id that exists: padding rows of graphs look it up
        self.tables.host_pages[:, slots] = 0
        self.tables.pages.index_fill_(1, where, 0)

    def _queue(self, job: Callable[[], None]) -> None:
        executor = self._core.executor
        if isinstance(executor, ThreadExecutor):
            while self._queued and self._queued[0].done():
                self._queued.pop(0).result()
            self._queued.append(executor._pool.submit(job))
        else:
            job()
