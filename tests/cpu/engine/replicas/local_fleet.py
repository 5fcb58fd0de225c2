"""A fleet without Ray, for `engine/replicas/ray.py`; sockets, chooser and link are the real ones.

Its replicas are real ones, with engines of device null in processes, or toys: those answer with made-up tokens and cost
nothing to start. `kill` ends one as SIGKILL does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from quire.config.engine import EngineConfig
from quire.core.commands import Cancel, ResetPrefixCache, Submit
from quire.core.events import Done, EngineReady, EngineStats, FinishReason, Leaving, SeqDelta, StepOutputs
from quire.engine.async_llm import AsyncLLM
from quire.engine.replicas.channel import EndpointAddress, Inbox, Outbox
from quire.engine.replicas.chooser import Chooser
from quire.engine.replicas.fleet import ReplicaLost
from quire.engine.replicas.link import ReplicaLink
from quire.engine.replicas.replica import EngineReplica
from quire.engine.wire import decode_commands

GONE = "the replica is gone"
TOKEN_S = 0.002
TOY = EngineReady(max_model_len=1024, n_pages=512, page_size=16, logits_width=4096, device="null")


class ToyReplica:
    """Answers as `EngineReplica` does, a token of each sequence at a time; it obeys Cancel and ResetPrefixCache."""

    def __init__(self, config: EngineConfig, address: EndpointAddress, name: str) -> None:
        self._outbox = Outbox(address, name)
        self._ready = msgspec.structs.replace(TOY, max_num_seqs=config.max_num_seqs or 64)
        self._stats = EngineStats(finished={"length": 0})
        self._cancelled: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._outbox.send(self._ready)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._report())]

    async def run(self, message: bytes) -> None:
        (submit,) = decode_commands(message)
        assert isinstance(submit, Submit)
        request, params = submit.request, submit.request.params
        self._stats.n_running += params.n
        try:
            for number in range(request.max_tokens):
                await asyncio.sleep(TOKEN_S)
                if request.request_id in self._cancelled:
                    return
                last = number + 1 == request.max_tokens
                self._stats.finished["length"] += params.n if last else 0
                self._stats.generation_tokens += params.n
                reason = FinishReason.LENGTH if last else None
                tokens = [(request.seed * 31 + number * 7 + sum(request.prompt_token_ids)) % 4096]
                self._outbox.send(
                    StepOutputs([SeqDelta(request.request_id, index, tokens, reason) for index in range(params.n)])
                )
        finally:
            self._stats.n_running -= params.n

    async def leave(self) -> None:
        self._outbox.send(Leaving())
        await self.stop()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._outbox.close()

    async def _listen(self) -> None:
        while True:
            for command in await self._outbox.receive():
                if isinstance(command, Cancel):
                    self._cancelled |= {*command.request_ids}
                elif isinstance(command, ResetPrefixCache):
                    self._outbox.send(Done(command.ticket))

    async def _report(self) -> None:
        while True:
            self._outbox.send(StepOutputs([], self._stats))
            await asyncio.sleep(0.05)


class LocalFleet:
    """See the module."""

    def __init__(
        self, config: EngineConfig, n: int, chooser: Chooser, kind: type[EngineReplica] | type[ToyReplica]
    ) -> None:
        self.failure: str | None = None
        self.replicas: dict[str, EngineReplica | ToyReplica] = {}
        self._kind = kind
        self.n_runs: dict[str, int] = {}
        self._config = config
        self._n = n
        self._chooser = chooser
        self.address: EndpointAddress | None = None
        self.wire_ids: list[str] = []
        self._runs: dict[str, set[asyncio.Task[None]]] = {}
        self._some = asyncio.Event()

    async def start(self, address: EndpointAddress) -> None:
        self.address = address
        await asyncio.gather(*(self.add(f"r{number}") for number in range(self._n)))

    async def add(self, name: str) -> None:
        assert self.address is not None
        replica = self._kind(self._config, self.address, name)
        await replica.start()
        self.replicas[name] = replica
        self.n_runs[name], self._runs[name] = 0, set()
        self._tell()

    async def run(self, wire_id: str, message: bytes) -> None:
        while not self.replicas:
            await self._some.wait()
        name = self._chooser.rank(wire_id, [*self.replicas])[0]
        self._chooser.placed(wire_id, name)
        self.n_runs[name] += 1
        self.wire_ids.append(wire_id)
        task = asyncio.create_task(self.replicas[name].run(message))
        self._runs[name].add(task)
        try:
            await task
        except asyncio.CancelledError:
            task.cancel()
            if name in self.replicas:
                raise
            raise ReplicaLost(GONE, is_gone=True) from None
        except Exception as error:
            raise ReplicaLost(str(error), is_gone=False) from None
        finally:
            self._runs[name].discard(task)

    async def retire(self, name: str) -> None:
        """It gets no more requests, as when the load has fallen, and goes when it has answered those it has."""
        replica = self.replicas.pop(name)
        self._tell()
        await asyncio.gather(*self._runs[name])
        await replica.leave()

    async def kill(self, name: str) -> None:
        """Its requests end with an error, and nothing more is heard of it."""
        replica = self.replicas.pop(name)
        self._tell()
        replica._outbox.close()
        for task in list(self._runs[name]):
            task.cancel()
        with contextlib.suppress(Exception):
            await replica.stop()

    async def close(self) -> None:
        for replica in self.replicas.values():
            await replica.stop()

    def _tell(self) -> None:
        self._chooser.routable = frozenset(self.replicas)
        (self._some.set if self.replicas else self._some.clear)()


@contextlib.asynccontextmanager
async def serving(
    n: int, kind: type[EngineReplica] | type[ToyReplica] = ToyReplica, **options: object
) -> AsyncIterator[tuple[AsyncLLM, LocalFleet, Chooser]]:
    """`n` replicas behind one AsyncLLM."""
    config = EngineConfig(device="null", disable_log_stats=True, **options)  # type: ignore[arg-type]
    chooser = Chooser()
    fleet = LocalFleet(config, n, chooser, kind)
    llm = await AsyncLLM.over(config, ReplicaLink(fleet, Inbox("127.0.0.1"), chooser, tuple), 0)
    try:
        async with asyncio.timeout(60):
            while len(chooser._n_slots) < n or len(fleet.replicas) < n:
                await asyncio.sleep(0.02)
        yield llm, fleet, chooser
    finally:
        await llm.shutdown()
        await fleet.close()
