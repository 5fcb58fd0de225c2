"""Questions and orders to all replicas, answered as by one engine; and the adapters that a replica must have.

Owns what waits for answers, and which adapters a replica that comes is to load or unload. Does not own what a
replica says else (`link.py`), nor its figures.
Invariants: a question is answered once all that were asked have answered, or are lost; a replica that comes while an
adapter is loaded, or later, is told too, and settled once it has answered that.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Union

import msgspec

from quire.core.commands import Command, Explain, LoadAdapter, Order, UnloadAdapter
from quire.core.errors import EngineLost, shown
from quire.core.events import Done, Explained
from quire.engine.replicas.stats import ReplicaFigures

logger = logging.getLogger("quire.engine")

Answer = Union[Explained, Done]
UNLIKE = (
    "the replicas have different adapters under the name {}, and requests that name it are refused: give all of them"
    " the same files, and load it again with load_inplace"
)


@dataclasses.dataclass(slots=True)
class _Question:
    """A question to all replicas, or to one that came later."""

    command: Explain | Order
    left: set[str]
    """Replicas that have not answered."""
    answer: Answer
    newcomer: str = ""
    """Whom it tells what all others were told before."""


class ReplicaQuestions:
    """send: to one replica, by its name. settled: told of a replica that came and has all adapters. modules: names of
    adapters that replicas have from their start."""

    def __init__(
        self,
        send: Callable[[str, Command], Awaitable[None]],
        figures: ReplicaFigures,
        settled: Callable[[str], None],
        modules: Callable[[], Collection[str]],
    ) -> None:
        self._send, self._figures, self._settled, self._modules = send, figures, settled, modules
        self.on_answer: Callable[[Answer], object] = lambda _: None
        """Given the answers."""
        self._asked: dict[int, _Question] = {}
        self._adapters: dict[str, LoadAdapter | UnloadAdapter] = {}
        """Name → what was done last about it; unloads of `modules` alone, which others have no use for."""

    async def ask(self, command: Explain | Order) -> None:
        """All of them. EngineLost if there are none."""
        names = self._figures.names()
        if not names:
            raise EngineLost("no replica is there: try again later")
        empty = Explained(command.ticket) if isinstance(command, Explain) else Done(command.ticket)
        self._asked[command.ticket] = _Question(command, set(names), empty)
        for name in names:
            await self._send(name, command)

    async def tell(self, replica: str) -> None:
        """A replica has come, or has a new engine: what it was asked before is lost."""
        self._figures.joining.discard(replica)
        self.miss(replica)
        self._figures.joining.add(replica)
        pending = [one for one in self._asked.values() if not one.newcomer]
        unloads = [one.command for one in pending if isinstance(one.command, UnloadAdapter)]
        for order in (*self._adapters.values(), *unloads):
            again = msgspec.structs.replace(order, ticket=secrets.randbits(62))
            if isinstance(again, LoadAdapter):
                again.in_place = True
            self._asked[again.ticket] = _Question(again, {replica}, Done(again.ticket), newcomer=replica)
            await self._send(replica, again)
        for question in pending:
            if isinstance(question.command, LoadAdapter):
                question.left.add(replica)
                await self._send(replica, question.command)
        self._settle(replica)

    def miss(self, replica: str) -> None:
        """It does not answer any more what it was asked before."""
        for ticket, question in list(self._asked.items()):
            if replica not in question.left:
                continue
            lost = f"replica {replica} was lost before it answered: try again"
            is_order = isinstance(question.answer, Done)
            self.take(replica, Done(ticket, value=False, error=lost) if is_order else Explained(ticket))

    def take(self, replica: str, answer: Answer) -> None:
        """What a replica has answered."""
        question = self._asked.get(answer.ticket)
        if question is None or replica not in question.left:
            return
        question.left.discard(replica)
        whole = question.answer
        if isinstance(whole, Explained) and isinstance(answer, Explained):
            whole.found += answer.found
        elif isinstance(whole, Done) and isinstance(answer, Done):
            whole.value &= answer.value
            if whole.error is None:
                whole.error, whole.param = answer.error, answer.param
        if question.left:
            return
        del self._asked[answer.ticket]
        if question.newcomer:
            self._caught_up(question)
        else:
            self.on_answer(self._checked(question))

    def _checked(self, question: _Question) -> Answer:
        """All have answered, after they said what adapters they have."""
        command, answer = question.command, question.answer
        match command, answer:
            case LoadAdapter(), Done(error=None):
                if self._figures.content_of(command.name):
                    self._adapters[command.name] = command
                else:
                    answer.value, answer.error = False, UNLIKE.format(shown(command.name))
            case UnloadAdapter(name=name), _:
                self._adapters.pop(name, None)
                if name in self._modules():
                    self._adapters[name] = command
        return answer

    def _caught_up(self, question: _Question) -> None:
        """A replica that came later has answered what it was told."""
        replica, command, answer = question.newcomer, question.command, question.answer
        if isinstance(command, LoadAdapter) and isinstance(answer, Done) and answer.error is not None:
            logger.warning(
                "replica %s lacks the adapter %s, which the others have, and requests that name it are refused: %s",
                replica, shown(command.name), answer.error,
            )  # fmt: skip
        self._settle(replica)

    def _settle(self, replica: str) -> None:
        """Once it has answered all that."""
        if replica in self._figures.joining and all(one.newcomer != replica for one in self._asked.values()):
            self._figures.joining.discard(replica)
            if replica in self._figures:
                self._settled(replica)
