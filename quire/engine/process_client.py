"""The API side of an engine process: start it, send commands, receive events, notice when it is gone."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineDead
from quire.core.events import Command, EngineFailed, EngineReady, Event, Shutdown, StepOutputs
from quire.engine.wire import ProcessStart, decode_event, encode, socket_folder

SILENCE_LIMIT_S = 10.0
"""A live engine sends statistics at least once a second; longer silence means that it does not progress."""
POLL_S = 0.2


class ProcessClient:
    """One engine process and the socket to it."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = socket_folder()
        address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._process = subprocess.Popen([sys.executable, "-m", "quire.engine.process"], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(ProcessStart(address, config)) + b"\n")
        self._process.stdin.flush()
        self._last_event_s = time.monotonic()
        self._failure: str | None = None

    async def wait_ready(self) -> EngineReady:
        """The engine's facts once it is loaded. Raises ConfigError with its reason if it could not load."""
        event = await self._receive()
        if isinstance(event, EngineFailed):
            self.close()
            raise ConfigError(event.message)
        assert isinstance(event, EngineReady)
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
            assert isinstance(event, StepOutputs)
            commands = take(event)
            if commands:
                await self.send(*commands)

    async def _receive(self) -> Event:
        while not await self._socket.poll(POLL_S * 1000):
            code = self._process.poll()
            if code is not None:
                self._failure = f"the engine process ended with exit status {code}"
                raise EngineDead(self._failure)
        self._last_event_s = time.monotonic()
        return decode_event(await self._socket.recv())

    def healthy(self) -> bool:
        """True while the process lives and its loop reports."""
        silent_s = time.monotonic() - self._last_event_s
        return self._failure is None and self._process.poll() is None and silent_s < SILENCE_LIMIT_S

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
