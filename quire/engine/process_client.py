"""The API side of an engine process: start it, send commands, receive events, notice when it is gone."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineDead, EngineError
from quire.core.events import Command, EngineFailed, EngineReady, EngineStats, Event, Shutdown, StepOutputs
from quire.engine.wire import ProcessStart, decode_event, encode, socket_folder

STEP_LIMIT_S = {"cpu": 600.0, "cuda": 30.0, "null": 10.0}
"""By device: the longest that one step may compute. On a CPU a large prefill takes minutes; on a GPU a step takes less
than a second, and the limit leaves room for kernels that are compiled late."""
STALL_LIMIT_S = 10.0
"""Work waits but no step is in flight: the scheduler makes no plan."""
SILENCE_LIMIT_S = {"cpu": 10.0, "cuda": 30.0, "null": 10.0}
"""A live engine sends statistics at least once a second, on a CPU also during a step; on CUDA the wait for a step
cannot be divided, so that silence may last as long as one."""
POLL_S = 0.2


def makes_progress(device: str, silent_s: float, stats: EngineStats) -> bool:
    """Whether an engine that sent `stats` last, and nothing for `silent_s`, is within the limits of its device."""
    limit_s = STEP_LIMIT_S[device] if stats.steps_in_flight else STALL_LIMIT_S
    return silent_s < SILENCE_LIMIT_S[device] and stats.last_step_age_s < limit_s


def _status(code: int) -> str:
    """An exit status as people read it."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name
    return f"{name}{', which the system sends when memory runs out' if -code == signal.SIGKILL else ''}"


class ProcessClient:
    """One engine process and the socket to it."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = socket_folder()
        address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        # A session of its own: Ctrl-C in a terminal reaches only this process, which decides what it means.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quire.engine.process"], stdin=subprocess.PIPE, start_new_session=True
        )
        if self._process.stdin is None:
            raise EngineError("the engine process has no standard input")
        self._process.stdin.write(msgspec.json.encode(ProcessStart(address, config)) + b"\n")
        self._process.stdin.flush()
        self._last_event_s = time.monotonic()
        self._failure: str | None = None
        self._device = "cpu"
        self._stats = EngineStats()

    async def wait_ready(self) -> EngineReady:
        """The engine's facts once it is loaded. Raises ConfigError with its reason if it could not load."""
        event = await self._receive()
        if isinstance(event, EngineFailed):
            self.close()
            raise ConfigError(event.message)
        if not isinstance(event, EngineReady):
            raise EngineError(f"the engine began with {type(event).__name__} instead of EngineReady")
        self._device = event.device
        return event

    async def send(self, *commands: Command) -> None:
        """Queue commands for the engine, in order. Raises EngineDead if it is gone."""
        if self._failure is not None:
            raise EngineDead(self._failure)
        await self._socket.send(encode(commands))

    async def receive_all(self, take: Callable[[StepOutputs], list[Command]]) -> None:
        """Hand every message to `take` and send the commands that it answers with. Raises EngineDead at the end."""
        while True:
            event = await self._receive()
            if isinstance(event, EngineFailed):
                self._failure = event.message
                raise EngineDead(event.message)
            if not isinstance(event, StepOutputs):
                raise EngineDead(f"the engine sent {type(event).__name__} while it ran")
            self._stats = event.stats or self._stats
            commands = take(event)
            if commands:
                await self.send(*commands)

    async def _receive(self) -> Event:
        while not await self._socket.poll(POLL_S * 1000):
            code = self._process.poll()
            if code is not None:
                self._failure = f"the engine process ended with {_status(code)}"
                raise EngineDead(self._failure)
        self._last_event_s = time.monotonic()
        return decode_event(await self._socket.recv())

    def healthy(self) -> bool:
        """True while the process lives, its loop reports, and steps end (or there is nothing to do)."""
        if self._failure is not None or self._process.poll() is not None:
            return False
        silent_s = time.monotonic() - self._last_event_s
        return makes_progress(self._device, silent_s, self._stats)

    @property
    def failure(self) -> str | None:
        """What ended the process, once that was noticed."""
        return self._failure

    async def shutdown(self) -> None:
        """Ask the process to leave, then make it."""
        if self._process.poll() is None and self._failure is None:
            await self._socket.send(encode([Shutdown()]))
            for _ in range(30):
                if self._process.poll() is not None:
                    break
                await asyncio.sleep(0.1)
        self.close()

    def close(self) -> None:
        """Free the socket and the process now (idempotent)."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
