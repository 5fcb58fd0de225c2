"""The sockets between an endpoint and its replicas, over TCP: events up, commands down. Requests come by Ray.

Owns addresses, keys and the numbers of messages. Does not own what is said (`link.py`, `replica.py`).
Invariants: only who was given the endpoint's key gets in, and all is encrypted (CurveZMQ); a message that was lost is
noticed at the next one.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from quire.core.commands import Command
from quire.core.errors import ConfigError
from quire.core.events import Event
from quire.engine.wire import decode_commands, decode_event, encode

MAX_QUEUED: Final = 65_536
"""Messages that wait for one that does not read: one a step."""
HEARTBEAT_MS: Final = 2000
LINGER_MS: Final = 500
"""A replica's last message may take so long at its end."""
_NUMBER_BYTES: Final = 8


class EndpointAddress(msgspec.Struct, frozen=True):
    """What a replica needs to reach the endpoint. Whoever has it can speak as a replica: it goes through Ray alone."""

    url: str
    server_key: str


class Inbox:
    """The endpoint's end. Made inside a running event loop."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`. ConfigError if that cannot be."""
        if not zmq.has("curve"):
            raise ConfigError("replicas need pyzmq with CURVE, which the wheels of PyPI have: install pyzmq from there")
        public, secret = zmq.curve_keypair()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        shown_host = f"[{host}]" if ":" in host else host
        try:
            port = self._socket.bind_to_random_port(f"tcp://{shown_host}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen for replicas on {host}: {error.strerror}") from None
        self.address = EndpointAddress(f"tcp://{shown_host}:{port}", public.decode())
        self._numbers: dict[str, int] = {}

    async def receive(self) -> tuple[str, Event | None]:
        """Who speaks, and what it says; None: something was lost before it. What one says with number 0 begins anew."""
        name, number_bytes, payload = await self._socket.recv_multipart()
        replica, number = name.decode(), int.from_bytes(number_bytes, "big")
        is_next = number in (0, self._numbers.get(replica, -1) + 1)
        self._numbers[replica] = number
        return replica, decode_event(payload) if is_next else None

    async def send(self, replica: str, *commands: Command) -> None:
        """To one replica; one that is gone misses it."""
        await self._socket.send_multipart((replica.encode(), encode(commands)))

    def close(self) -> None:
        """Free the socket."""
        self._socket.close(linger=0)
        self._context.term()


class Outbox:
    """A replica's end. Made inside a running event loop."""

    def __init__(self, address: EndpointAddress, name: str) -> None:
        public, secret = zmq.curve_keypair()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, address.server_key.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS)
        self._socket.setsockopt(zmq.IPV6, int("[" in address.url))
        self._socket.connect(address.url)
        self._number = 0
        self.is_broken = False
        """The endpoint has not read for so long that a message was dropped; it will notice."""

    def send(self, event: Event) -> None:
        """Queue an event; never waits."""
        frames = (self._number.to_bytes(_NUMBER_BYTES, "big"), encode(event))
        self._number += 1
        sending = asyncio.ensure_future(self._socket.send_multipart(frames, zmq.DONTWAIT))
        sending.add_done_callback(self._note)

    async def receive(self) -> list[Command]:
        """The next commands."""
        return decode_commands(await self._socket.recv())

    def close(self) -> None:
        """Free the socket, once what was sent is on its way, or after `LINGER_MS`."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    def _note(self, sending: asyncio.Future[Any]) -> None:
        if not sending.cancelled() and sending.exception() is not None:
            self.is_broken = True
