"""`ReplicaLink`: several replicas as one engine for `AsyncLLM`. Requests go out by the fleet, which is Ray's business,
and what they give comes back into the inbox.

Owns which request runs where and under which name. Does not own who lives (`fleet.py`), the choice (`chooser.py`), nor
who runs again (`engine/recovery.py`).
Invariants: an attempt has a name of its own, so that what a lost replica still says reaches nobody; an attempt ends in
its last delta, a Cancel, or one RequestsLost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from quire.core.commands import (
    Cancel,
    CancelSeq,
    Command,
    Explain,
    LoadAdapter,
    ResetPrefixCache,
    Sleep,
    Submit,
    UnloadAdapter,
    WakeUp,
)
from quire.core.errors import EngineDead
from quire.core.events import (
    Done,
    EngineReady,
    EngineStats,
    Event,
    Explained,
    Leaving,
    PrefixUpdate,
    RequestsLost,
    SeqDelta,
    StepOutputs,
)
from quire.engine.replicas.channel import Inbox
from quire.engine.replicas.chooser import Chooser
from quire.engine.replicas.fleet import Fleet, ReplicaLost
from quire.engine.replicas.following import PrefixFollowing
from quire.engine.replicas.questions import ReplicaQuestions
from quire.engine.replicas.stats import ReplicaFigures
from quire.engine.wire import encode

logger = logging.getLogger("quire.engine")

Take = Callable[[StepOutputs], list[Command]]
Other = Callable[[Event], list[Command]]

ARRIVAL_S: Final = 10.0
"""A replica says by Ray that a request has ended: its last delta, sent before, may take so long by the other way."""
SILENT_S: Final = 10.0
"""A replica reports twice a second; one that does not for so long counts as none for /health, and if it has left
before, what it had is lost."""
LATE_S: Final = 2.0
"""And one that does not for so long gets no more requests as long as another does."""
LOOK_S: Final = 0.5
LEFT = "the replica that ran this request has left and says nothing: send the request again"
HOLE = "a message of the replica that ran this request was lost on the way: send the request again"


@dataclasses.dataclass(slots=True)
class _Attempt:
    """A request on its way through one replica."""

    request_id: str
    wire_id: str
    n_open: int
    """Sequences that have not ended."""
    began_s: float
    is_heard: bool = False
    """It has a token."""
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Wait for its replica no longer."""
        if self.task is not None:
            self.task.cancel()


class ReplicaLink:
    """See the module. Made inside a running event loop. modules: see `ReplicaQuestions`."""

    def __init__(self, fleet: Fleet, inbox: Inbox, chooser: Chooser, modules: Callable[[], Collection[str]]) -> None:
        self._fleet = fleet
        self._inbox = inbox
        self._chooser = chooser
        self._figures = ReplicaFigures()
        self._heard_s: dict[str, float] = {}
        self._introduced_s: dict[str, float] = {}
        self._attempts: dict[str, _Attempt] = {}
        """By the request's own id."""
        self._wires: dict[str, _Attempt] = {}
        """By the attempt's name."""
        self._n_attempts = 0
        self._n_lost = 0
        self._accounted: set[str] = set()
        """Replicas whose loss is counted, and those that have said that they leave, which is none."""
        self._left_s: dict[str, float] = {}
        """Replicas that have left, and when that was seen: until nothing more is expected of them."""
        self._questions = ReplicaQuestions(inbox.send, self._figures, self._settled, modules)
        self._following = PrefixFollowing(chooser, inbox.send)
        self._routing = chooser.stats()
        """As it was a moment ago: counting what is on its way takes time in proportion to it."""
        self._take: Take | None = None
        self._other: Other | None = None
        self._starting: asyncio.Future[None] | None = None

    async def wait_ready(self) -> EngineReady:
        """Have the replicas started; the facts once the first one is loaded. ConfigError if none can be."""
        self._starting = asyncio.ensure_future(self._fleet.start(self._inbox.address))
        receiving = asyncio.ensure_future(self._receive_ready())
        try:
            await asyncio.wait((self._starting, receiving), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                self._starting.result()
                await asyncio.wait((receiving,), timeout=ARRIVAL_S)
            if not receiving.done():
                raise EngineDead(
                    f"the replicas run, but none reaches this process at {self._inbox.address.url}: open this machine's"
                    " ports to the nodes of the cluster"
                )
            receiving.result()
        finally:
            receiving.cancel()
        return self._figures.ready(self._n_lost)

    async def send(self, *commands: Command) -> None:
        """Place requests, and tell replicas what concerns those that they have."""
        for command in commands:
            match command:
                case Submit():
                    self._submit(command)
                case Cancel(request_ids):
                    for request_id in request_ids:
                        await self._cancel(request_id)
                case CancelSeq(request_id, index):
                    await self._cancel_seq(request_id, index)
                case Explain() | ResetPrefixCache() | Sleep() | WakeUp() | LoadAdapter() | UnloadAdapter():
                    await self._questions.ask(command)

    async def receive_all(self, take: Take, other: Other) -> None:
        """Until EngineDead: the fleet has nobody left and will not start any."""
        self._take, self._other, self._questions.on_answer = take, other, other
        tasks = [asyncio.create_task(work) for work in (self._receive_for_ever(), self._look())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()

    def healthy(self) -> bool:
        """True while a replica takes requests and reports."""
        now_s = time.monotonic()
        routable = self._chooser.routable
        return any(now_s - self._heard_s[name] < SILENT_S for name in self._figures.names() if name in routable)

    def close(self) -> None:
        """Forget all requests and free the socket."""
        if self._starting is not None:
            self._starting.cancel()
        for attempt in list(self._wires.values()):
            self._forget(attempt)
            attempt.stop()
        self._inbox.close()

    def _submit(self, submit: Submit) -> None:
        request_id = submit.request.request_id
        self._n_attempts += 1
        wire_id = f"{request_id}.{self._n_attempts}"
        if submit.request.adapter and not submit.request.content_id:  # wherever it runs again, it is the same one
            submit.request.content_id = self._figures.content_of(submit.request.adapter)
        request = msgspec.structs.replace(submit.request, request_id=wire_id)
        attempt = _Attempt(request_id, wire_id, request.params.n, time.monotonic())
        self._attempts[request_id] = self._wires[wire_id] = attempt
        self._chooser.expect(wire_id, request)
        message = encode([Submit(request, submit.trial)])
        attempt.task = asyncio.create_task(self._carry(attempt, message), name=f"quire-{wire_id}")

    async def _carry(self, attempt: _Attempt, message: bytes) -> None:
        """One attempt, from the choice of its replica to its end."""
        try:
            await self._fleet.run(attempt.wire_id, message)
            async with asyncio.timeout(ARRIVAL_S):
                await attempt.ended.wait()
        except ReplicaLost as lost:
            self._note_loss(attempt, lost.is_gone)
            await self._lose([attempt], lost.message)
        except TimeoutError:
            await self._lose([attempt], HOLE)

    def _note_loss(self, attempt: _Attempt, is_gone: bool) -> None:
        """A replica is gone, or is without an engine: then it takes no request before it has said that it has one."""
        replica = self._chooser.replica_of(attempt.wire_id)
        if not is_gone:
            if self._introduced_s.get(replica, 0.0) < attempt.began_s:  # else it has one again already
                self._chooser.dismiss(replica)
        elif replica and replica not in self._accounted:
            self._dismiss(replica)

    async def _lose(self, attempts: list[_Attempt], reason: str) -> None:
        lost = [attempt for attempt in attempts if self._forget(attempt)]
        if lost and self._other is not None:
            commands = self._other(RequestsLost([attempt.request_id for attempt in lost], reason))
            await self.send(*commands)

    def _forget(self, attempt: _Attempt) -> bool:
        """False if it had ended."""
        if self._wires.pop(attempt.wire_id, None) is None:
            return False
        if self._attempts.get(attempt.request_id) is attempt:
            del self._attempts[attempt.request_id]
        self._chooser.done(attempt.wire_id)
        attempt.ended.set()
        return True

    async def _cancel(self, request_id: str) -> None:
        attempt = self._attempts.get(request_id)
        if attempt is None:
            return
        replica = self._chooser.replica_of(attempt.wire_id)
        self._forget(attempt)
        if replica in self._figures:
            await self._inbox.send(replica, Cancel([attempt.wire_id]))
        else:
            attempt.stop()

    async def _cancel_seq(self, request_id: str, index: int) -> None:
        attempt = self._attempts.get(request_id)
        if attempt is None:
            return
        replica = self._chooser.replica_of(attempt.wire_id)
        self._count_end(attempt)
        await self._inbox.send(replica, CancelSeq(attempt.wire_id, index))

    async def _receive_ready(self) -> None:
        while not self._figures.names():
            await self._receive()

    async def _receive_for_ever(self) -> None:
        while True:
            await self._receive()

    async def _receive(self) -> None:
        """Deal with one message."""
        replica, event = await self._inbox.receive()
        self._heard_s[replica] = time.monotonic()
        self._chooser.silent -= {replica}
        match event:
            case None:
                self._questions.miss(replica)
                await self._lose([one for one in self._wires.values() if self._is_at(one, replica)], HOLE)
            case EngineReady():
                await self._introduce(replica, event)
            case StepOutputs():
                await self._take_outputs(replica, event)
            case Explained() | Done():
                self._questions.take(replica, event)
            case Leaving():
                self._accounted.add(replica)
            case PrefixUpdate():
                self._following.take(replica, event, self._heard_s[replica])

    async def _introduce(self, replica: str, ready: EngineReady) -> None:
        if replica in self._figures:
            self._n_lost += 1  # of its engines
        self._introduced_s[replica] = time.monotonic()
        self._figures.introduce(replica, ready)
        await self._questions.tell(replica)
        self._tell_ready()

    def _settled(self, replica: str) -> None:
        """It has the adapters that the others have: requests may come."""
        ready = self._figures.ready_of(replica)
        self._chooser.introduce(
            replica, ready.max_num_seqs, ready.n_pages, ready.page_size, deterministic_apart=ready.deterministic_apart
        )
        logger.info("replica %s serves: %d sequences, %d pages", replica, ready.max_num_seqs, ready.n_pages)

    def _dismiss(self, replica: str) -> None:
        self._n_lost += replica not in self._accounted
        self._accounted.add(replica)
        if replica in self._figures:
            logger.warning("replica %s is gone, with %d open sequences", replica, self._chooser.n_open(replica))
        self._figures.dismiss(replica)
        self._chooser.dismiss(replica)
        self._heard_s.pop(replica, None)
        self._introduced_s.pop(replica, None)
        self._questions.miss(replica)
        self._tell_ready()

    def _tell_ready(self) -> None:
        if self._other is not None and self._figures.names():
            self._other(self._figures.ready(self._n_lost))

    async def _take_outputs(self, replica: str, outputs: StepOutputs) -> None:
        if outputs.stats is not None:
            self._figures.note(replica, outputs.stats)
        deltas: list[SeqDelta] = []
        for delta in outputs.deltas:
            attempt = self._wires.get(delta.request_id)
            if attempt is None:
                continue
            delta.request_id = attempt.request_id
            if not attempt.is_heard and delta.failure is None:
                attempt.is_heard = True
                self._chooser.found(attempt.wire_id, delta.n_cached)
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._count_end(attempt)
        if self._take is not None and (deltas or outputs.stats is not None):
            stats = self._stats() if outputs.stats is not None else None
            await self.send(*self._take(StepOutputs(deltas, stats)))

    def _stats(self) -> EngineStats:
        stats = self._figures.stats()
        stats.routing = self._routing
        return stats

    def _count_end(self, attempt: _Attempt) -> None:
        attempt.n_open -= 1
        if attempt.n_open <= 0:
            self._forget(attempt)

    def _is_at(self, attempt: _Attempt, replica: str) -> bool:
        return self._chooser.replica_of(attempt.wire_id) == replica

    async def _look(self) -> None:
        """Dismiss replicas that take no requests any more and have said nothing since. EngineDead with the fleet."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._fleet.failure is not None:
                raise EngineDead(self._fleet.failure)
            self._check_start()
            routable, now_s = self._chooser.routable, time.monotonic()
            for name in self._figures.names():
                is_out = name in self._chooser.was_routable and name not in routable
                if is_out and now_s - self._heard_s.get(name, 0.0) > 4 * LOOK_S:
                    self._left_s[name] = now_s
                    self._dismiss(name)
            self._pass_by_silent(now_s)
            await self._give_up_left(now_s)
            await self._following.look(self._figures.names(), now_s)
            self._routing = self._chooser.stats()

    def _pass_by_silent(self, now_s: float) -> None:
        """Have requests go to those that speak, and say of whom they do not go to any more."""
        late = [name for name in self._figures.names() if now_s - self._heard_s.get(name, now_s) > LATE_S]
        for name in late:
            if name not in self._chooser.silent:
                logger.warning(
                    "replica %s has said nothing for %g s: while another speaks it gets no requests; its %d open"
                    " sequences wait for it", name, LATE_S, self._chooser.n_open(name),
                )  # fmt: skip
        self._chooser.silent = frozenset(late)

    async def _give_up_left(self, now_s: float) -> None:
        """What those had that have left and are silent: one that was stopped ends nothing, and the fleet cannot."""
        spoke_s = {name: max(left_s, self._heard_s.get(name, 0.0)) for name, left_s in self._left_s.items()}
        for name in [name for name, last_s in spoke_s.items() if now_s - last_s > SILENT_S]:
            del self._left_s[name]
            attempts = [one for one in self._wires.values() if self._is_at(one, name)]
            await self._lose(attempts, LEFT)
            for attempt in attempts:
                attempt.stop()

    def _check_start(self) -> None:
        """Say why the other replicas do not come while the first one serves."""
        starting = self._starting
        if starting is not None and starting.done():
            self._starting = None
            error = None if starting.cancelled() else starting.exception()
            if error is not None:
                logger.error("not all replicas could be started: %s", error)
