"""A client's end of the socket to the engine: commands out, events in, and the news that the engine is gone.

Owns the socket of one API process. Does not own the engine's life (`supervisor.py`) nor requests (`async_llm.py`).
Invariant: what was sent to one engine process never reaches the next one: each has a socket of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from quire.core.commands import Command, Hello
from quire.core.errors import EngineDead, EngineError, EngineLost
from quire.core.events import EngineReady, EngineStats, Event, StepOutputs
from quire.engine.progress import makes_progress
from quire.engine.wire import decode_event, encode

Result = TypeVar("Result")

RECONNECT_MS = 50
MAX_QUEUED = 4096
"""Events that wait for this process before they wait in the engine's."""
TURN_S = 0.005
"""How long the messages of an engine that is ahead keep the event loop from others."""
TURN_DELTAS = 32
"""Sequences of a step that are dealt with before the time is looked at."""
CUT = "this process did not read what the engine sent, which has cancelled its requests: send the request again"
LOST = "the engine process ended while it ran this request; another one is being started: send the request again"


class Link(Protocol):
    """What `AsyncLLM` sends commands into and takes events out of: an engine, or several that look like one
    (`replicas/link.py`)."""

    async def wait_ready(self) -> EngineReady:
        """The facts once there is an engine that is loaded."""

    async def send(self, *commands: Command) -> None:
        """Queue commands. EngineLost while nobody takes them."""

    async def receive_all(
        self, take: Callable[[StepOutputs], list[Command]], other: Callable[[Event], list[Command]]
    ) -> None:
        """Hand over all events; send the commands that they are answered with. EngineLost when all is lost."""

    def healthy(self) -> bool:
        """True while requests make progress."""

    def close(self) -> None:
        """Free everything (idempotent)."""


class EngineLink:
    """See the module. Made inside a running event loop."""

    def __init__(self, address: str, stall_timeout_s: float = 0.0) -> None:
        self._address = address
        self._stall_timeout_s = stall_timeout_s
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._lost: asyncio.Task[None] | None = None
        """Waits until the other end of this very socket is gone: its news comes once, so one task waits for it."""
        self._connected = False
        self._device = "cpu"
        self._last_event_s = 0.0
        self._turn_s = 0.0
        self._stats = EngineStats()

    async def wait_ready(self) -> EngineReady:
        """Connect to the engine that is or will be there; its facts once it is loaded."""
        while True:
            try:
                return await self._greet()
            except EngineLost:
                continue  # it ended while it loaded; the next one may be luckier

    async def send(self, *commands: Command) -> None:
        """Queue commands for the engine, in order. Raises EngineLost while there is none."""
        if self._socket is None or not self._connected:
            raise EngineLost("the engine is being started again: try again later")
        await self._socket.send(encode(commands))

    async def receive_all(
        self, take: Callable[[StepOutputs], list[Command]], other: Callable[[Event], list[Command]]
    ) -> None:
        """Hand all outputs to `take` and every other event to `other`, and send the commands that they answer with.
        Raises EngineLost when the engine is gone."""
        await self._until_lost(self._take_all(take, other))

    def healthy(self) -> bool:
        """True while an engine is there, its loop reports, ranks live, and steps end (or there is nothing to do)."""
        silent_s = time.monotonic() - self._last_event_s
        stats = self._stats
        return (
            self._connected
            and not stats.is_late
            and makes_progress(
                self._device, silent_s, stats.last_step_age_s, stats.steps_in_flight, self._stall_timeout_s
            )
        )

    def close(self) -> None:
        """Free the socket (idempotent)."""
        self._disconnect()
        self._context.term()

    async def _greet(self) -> EngineReady:
        self._disconnect()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._lost = asyncio.create_task(self._wait_lost(self._monitor), name="quire-link-lost")
        self._socket.connect(self._address)
        await self._socket.send(encode([Hello()]))
        event = await self._until_lost(self._receive())
        if not isinstance(event, EngineReady):
            raise EngineError(f"the engine began with {type(event).__name__} instead of EngineReady")
        self._device, self._connected = event.device, True
        self._stats = EngineStats()
        return event

    async def _until_lost(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Result of `work`, or EngineLost as soon as the other end is gone."""
        if self._lost is None:
            work.close()
            raise EngineDead("the link to the engine is closed")
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            self._connected = False
            raise EngineLost(LOST)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _wait_lost(self, monitor: zmq.asyncio.Socket) -> None:
        event = 0
        while event != zmq.EVENT_DISCONNECTED:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]

    async def _take_all(
        self, take: Callable[[StepOutputs], list[Command]], other: Callable[[Event], list[Command]]
    ) -> None:
        while True:
            event = await self._receive()
            if not isinstance(event, StepOutputs):
                answers = other(event)
                if answers:
                    await self.send(*answers)
                continue
            self._stats = event.stats or self._stats
            commands = take(StepOutputs(event.deltas[:TURN_DELTAS], event.stats))
            for start in range(TURN_DELTAS, len(event.deltas), TURN_DELTAS):
                await self._give_turn()
                commands += take(StepOutputs(event.deltas[start : start + TURN_DELTAS]))
            if commands:
                await self.send(*commands)

    async def _receive(self) -> Event:
        if self._socket is None:
            raise EngineDead("the link to the engine is closed")
        await self._give_turn()  # while messages wait, receiving gives none
        coming = cast("asyncio.Future[bytes]", self._socket.recv())  # pyzmq promises an awaitable only
        waits = not coming.done()
        message = await coming
        self._last_event_s = time.monotonic()
        if waits:
            self._turn_s = self._last_event_s
        return decode_event(message)

    async def _give_turn(self) -> None:
        """Let others run if the messages of an engine that is ahead have kept the event loop for long."""
        if time.monotonic() - self._turn_s > TURN_S:
            await asyncio.sleep(0)
            self._turn_s = time.monotonic()

    def _disconnect(self) -> None:
        self._connected = False
        if self._lost is not None:
            self._lost.cancel()
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = self._lost = None
