"""One replica: an engine with its supervisor, and its way to the endpoint. Runs inside an actor; knows nothing of Ray.

Owns which requests it runs. Does not own the engine's life (`supervisor.py`) nor who may ask for what: the endpoint
has checked that.
Invariant: `run` returns once the last delta of its request was sent, or raises EngineLost: then no more follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from quire.config.engine import EngineConfig
from quire.core.commands import Cancel, CancelSeq, Command, Submit
from quire.core.errors import EngineDead, EngineError, EngineLost
from quire.core.events import ClientCut, Event, Leaving, StepOutputs
from quire.engine.link import CUT, LOST, EngineLink
from quire.engine.replicas.channel import EndpointAddress, Outbox
from quire.engine.supervisor import EngineSupervisor
from quire.engine.wire import decode_commands

logger = logging.getLogger("quire.engine")


class _Run:
    """A request under way."""

    __slots__ = ("end", "n_open")

    def __init__(self, n_open: int) -> None:
        self.n_open = n_open
        """Sequences that have not ended."""
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class EngineReplica:
    """See the module. Made inside a running event loop; `start` comes first, `stop` last."""

    def __init__(self, config: EngineConfig, address: EndpointAddress, name: str) -> None:
        """name: differs among all replicas of the endpoint."""
        self._supervisor = EngineSupervisor(config)
        self._link = EngineLink(self._supervisor.address, config.engine_stall_timeout)
        self._outbox = Outbox(address, name)
        self._loaded = asyncio.Event()
        """There is an engine."""
        self._runs: dict[str, _Run] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the engine and tell the endpoint. Raises ConfigError if it cannot be loaded, EngineError if it died."""
        try:
            await self._supervisor.start()
            self._outbox.send(await self._link.wait_ready())
            self._loaded.set()
            self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._listen())]
        finally:
            if not self._tasks:
                await self.stop()

    async def run(self, message: bytes) -> None:
        """Run the request of a Submit, once there is an engine. EngineLost if the engine was lost, or has cancelled it.
        When this task is cancelled the engine stops too."""
        (submit,) = decode_commands(message)
        if not isinstance(submit, Submit):
            raise EngineError(f"a replica was asked to run {type(submit).__name__}")
        request_id = submit.request.request_id
        run = self._runs[request_id] = _Run(submit.request.params.n)
        try:
            await self._loaded.wait()
            if not run.end.done():
                await self._link.send(submit)
            await run.end
        except asyncio.CancelledError:
            with contextlib.suppress(EngineLost):
                await self._link.send(Cancel([request_id]))
            raise
        finally:
            del self._runs[request_id]

    def check(self) -> None:
        """EngineDead once no engine is there and none will come, or the endpoint does not read."""
        if self._supervisor.failure is not None:
            raise EngineDead(self._supervisor.failure)
        if self._outbox.is_broken:
            raise EngineDead("the endpoint does not read what the replica sends")

    async def leave(self) -> None:
        """Tell the endpoint that this end is meant, and stop. Without an engine it is none: then nothing is told."""
        if self._loaded.is_set():
            self._outbox.send(Leaving())
        await self.stop()

    async def stop(self) -> None:
        """End the engine and free everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all("the replica was stopped")
        self._link.close()
        self._outbox.close()
        await self._supervisor.shutdown()

    async def _receive(self) -> None:
        """Pass on what the engine says; after its loss, what the next one says."""
        try:
            while True:
                try:
                    await self._link.receive_all(self._take, self._hear)
                except EngineLost:
                    self._loaded.clear()
                    self._fail_all(LOST)
                    final = await self._supervisor.verdict()
                    if final is not None:
                        raise EngineDead(final) from None
                    self._outbox.send(await self._next_engine())
                    self._loaded.set()
        except EngineDead as error:
            logger.error("the replica has no engine any more: %s", error.message)
            self._fail_all(error.message)

    async def _next_engine(self) -> Event:
        waiting = asyncio.ensure_future(self._link.wait_ready())
        ending = asyncio.ensure_future(self._supervisor.ended.wait())
        try:
            await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
            if self._supervisor.failure is not None:
                raise EngineDead(self._supervisor.failure)
            return waiting.result()
        finally:
            waiting.cancel()
            ending.cancel()

    async def _listen(self) -> None:
        """Obey the endpoint."""
        while True:
            commands = await self._outbox.receive()
            for command in commands:
                self._note(command)
            try:
                await self._link.send(*commands)
            except EngineError:
                continue  # whoever asked sees the loss

    def _take(self, outputs: StepOutputs) -> list[Command]:
        self._outbox.send(outputs)
        for delta in outputs.deltas:
            if delta.finish_reason is not None:
                self._count_end(delta.request_id)
        return []

    def _hear(self, event: Event) -> list[Command]:
        if isinstance(event, ClientCut):
            self._fail_all(CUT)
        else:
            self._outbox.send(event)
        return []

    def _note(self, command: Command) -> None:
        match command:
            case Cancel(request_ids):
                for request_id in request_ids:
                    self._end(request_id)
            case CancelSeq(request_id, _):
                self._count_end(request_id)

    def _count_end(self, request_id: str) -> None:
        run = self._runs.get(request_id)
        if run is not None:
            run.n_open -= 1
            if run.n_open <= 0:
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        run = self._runs.get(request_id)
        if run is not None and not run.end.done():
            run.end.set_result(None)

    def _fail_all(self, message: str) -> None:
        for run in self._runs.values():
            if not run.end.done():
                run.end.set_exception(EngineLost(message))
