"""Ranks that are threads of a test's process, over gloo."""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Callable
from typing import Any

from quire.compute.dist.gloo import GlooComm


def on_ranks(
    size: int, folder: pathlib.Path, work: Callable[[GlooComm], Any], kind: type[GlooComm] = GlooComm
) -> list[Any]:
    """What each rank makes of it."""

    def run(rank: int) -> Any:
        comm = kind(rank, size, str(folder / "meet"), timeout_s=30)
        comm.__dict__["_group"] = GlooComm.__dict__["_group"].func(comm)  # which threads would wait for in turn
        comm.join()  # one that asks nothing might leave before the others have come
        try:
            return work(comm)
        finally:
            comm.close()

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
