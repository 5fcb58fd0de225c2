"""Questions to the engine and their answers: why requests took as long as they did. Owns what waits for an answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from quire.core.events import Explain, Explained, Explanation

EXPLAIN_S = 5.0


class Questions:
    """Of one client of the engine. send: hands a question to it."""

    def __init__(self, send: Callable[[Explain], Awaitable[None]]) -> None:
        self._send = send
        self._asked: dict[int, asyncio.Future[list[Explanation]]] = {}
        """Tickets → what waits for the answers."""

    async def explain(self, label: str) -> list[Explanation]:
        """See `AsyncLLM.explain`."""
        ticket = secrets.randbits(62)
        asked = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self._send(Explain(ticket, label))
            async with asyncio.timeout(EXPLAIN_S):
                return await asked
        finally:
            self._asked.pop(ticket, None)

    def answer(self, event: Explained) -> None:
        """The engine has answered; nobody may wait for it any more."""
        asked = self._asked.pop(event.ticket, None)
        if asked is not None and not asked.done():
            asked.set_result(event.found)
