"""Work that runs beside the requests for as long as the server does. Owns that its end is never silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("quire.serve")

RESTART_S = 5.0


async def keep_going(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until it returns or this task is cancelled. When it raises that is logged, and it runs again."""
    while True:
        try:
            await work()
            return
        except Exception:
            name = getattr(work, "__qualname__", "work beside the requests")
            logger.exception("%s ended unexpectedly; it is started again in %g s", name, RESTART_S)
            await asyncio.sleep(RESTART_S)
