"""Questions and orders to the engine and their answers. Owns what waits for an answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from quire.core.commands import Explain, Order
from quire.core.errors import EngineError, QuireError, SleepFailed
from quire.core.events import Done, Explained, Explanation

EXPLAIN_S = 5.0


class Questions:
    """Of one client of the engine. send: hands a question or an order to it."""

    def __init__(self, send: Callable[[Explain | Order], Awaitable[None]]) -> None:
        self._send = send
        self._asked: dict[int, asyncio.Future[Explained | Done]] = {}
        """Tickets → what waits for the answers."""

    async def explain(self, label: str) -> list[Explanation]:
        """See `AsyncLLM.explain`."""
        answer = await self._ask(lambda ticket: Explain(ticket, label), EXPLAIN_S)
        return answer.found if isinstance(answer, Explained) else []

    async def order(self, make: Callable[[int], Order], failed: type[QuireError] = SleepFailed) -> bool:
        """Have an order carried out, which is made of its ticket; its value. Raises `failed` with the engine's reason,
        and EngineLost or EngineDead without an engine."""
        answer = await self._ask(make, None)
        if isinstance(answer, Done) and answer.error is not None:
            raise failed(answer.error, param=answer.param)
        return isinstance(answer, Done) and answer.value

    def answer(self, event: Explained | Done) -> None:
        """The engine has answered; nobody may wait for it any more."""
        asked = self._asked.pop(event.ticket, None)
        if asked is not None and not asked.done():
            asked.set_result(event)

    def fail(self, error: EngineError) -> None:
        """The engine that was asked is gone."""
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(type(error)(error.message))

    async def _ask(self, make: Callable[[int], Explain | Order], limit_s: float | None) -> Explained | Done:
        ticket = secrets.randbits(62)
        asked: asyncio.Future[Explained | Done] = asyncio.get_running_loop().create_future()
        self._asked[ticket] = asked
        try:
            await self._send(make(ticket))
            async with asyncio.timeout(limit_s):
                return await asked
        finally:
            self._asked.pop(ticket, None)
