"""The load generator: arrival times, a limit on requests in flight, and one task for each request.

Owns when a request is sent; `client` owns how. Invariant: arrivals are absolute times, so a slow client falls behind
visibly (`scheduled_s` against `start_s`) instead of lowering the rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from tqdm import tqdm

from quire.bench.client import ClientTrace
from quire.bench.datasets import BenchRequest
from quire.core.ticker import ticking

Send = Callable[[BenchRequest, float], Awaitable[ClientTrace]]
"""(request, scheduled time) → trace."""


def arrival_offsets_s(n: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `n` requests is due; the first at 0.

    Gaps are gamma distributed with mean 1/rate and the given shape (1: a Poisson process), as in vLLM.
    """
    if math.isinf(request_rate * burstiness):
        return [0.0] * n
    rng = random.Random(f"{seed}/arrivals")
    scale_s = 1 / (request_rate * burstiness)
    gaps_s = (rng.gammavariate(burstiness, scale_s) for _ in range(n - 1))
    return list(itertools.accumulate(gaps_s, initial=0.0))[:n]


@contextlib.contextmanager
def counted(n: int) -> Iterator[Callable[[], object]]:
    """Gives what is to be called for each of n requests that is answered: a bar on a terminal, else the log's lines."""
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=n, unit="req", disable=None))
        if not bar.disable:
            yield bar.update
            return
        ticker = stack.enter_context(ticking("requests answered", n))
        yield lambda: ticker.advance(1)


async def run_load(
    requests: Sequence[BenchRequest],
    send: Send,
    offsets_s: Sequence[float],
    max_concurrency: int = 0,
    on_done: Callable[[], object] = lambda: None,
) -> tuple[list[ClientTrace], float]:
    """Send every request at its time; returns their traces in order and the seconds until the last was answered."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    begin_s = time.perf_counter()

    async def one(request: BenchRequest, due_s: float) -> ClientTrace:
        async with gate:
            trace = await send(request, due_s)
        on_done()
        return trace

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, offset_s in zip(requests, offsets_s, strict=True):
            wait_s = begin_s + offset_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(request, begin_s + offset_s)))
    return [task.result() for task in tasks], time.perf_counter() - begin_s
