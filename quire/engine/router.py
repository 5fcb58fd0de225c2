"""The engine's end of the socket: any number of API processes, each with a bounded queue of its own.

Owns which client has which request. Does not own what commands mean.
Invariants: nothing here waits for a client; one that does not read loses its requests once its queue is full, and
learns it; the requests of one that is gone are cancelled by the loop (`take_orphans`).
"""

from __future__ import annotations

import logging

import zmq

from quire.core.commands import (
    Cancel,
    CancelSeq,
    Command,
    Explain,
    FollowPrefixes,
    Hello,
    LoadAdapter,
    ResetPrefixCache,
    Sleep,
    Submit,
    UnloadAdapter,
    WakeUp,
)
from quire.core.events import ClientCut, Done, EngineReady, Event, Explained, SeqDelta, StepOutputs
from quire.engine.command_reader import read_commands
from quire.engine.wire import encode

logger = logging.getLogger("quire.engine")

MAX_QUEUED = 16_384
"""Messages that wait for one client; the engine sends one a step."""
LINGER_MS = 1000

Parts = dict[bytes, list[SeqDelta]]


class _Client:
    """One API process."""

    __slots__ = ("is_cut", "n_open")

    def __init__(self) -> None:
        self.n_open: dict[str, int] = {}
        """Its requests → sequences that have not ended."""
        self.is_cut = False
        """It did not read; it has to be told."""


class ClientRouter:
    """See the module. `ready` is the answer to every Hello."""

    def __init__(self, socket: zmq.Socket[bytes], ready: EngineReady) -> None:
        self._socket = socket
        self._ready = encode(ready)
        self._clients: dict[bytes, _Client] = {}
        self._owners: dict[str, bytes] = {}
        self._orphans: list[str] = []
        self._askers: dict[int, bytes] = {}

    @staticmethod
    def bind(address: str) -> zmq.Socket[bytes]:
        """The socket at which clients connect; they may write before there is a ClientRouter."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        socket.bind(address)
        return socket

    def receive(self, timeout_s: float) -> tuple[list[Command], list[SeqDelta]] | None:
        """One message: its commands, and the ends of submissions that cannot be read; None after `timeout_s`."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        identity, message = self._socket.recv_multipart()
        commands, refused = read_commands(message)
        client = self._clients.setdefault(identity, _Client())
        for delta in refused:
            client.n_open[delta.request_id] = client.n_open.get(delta.request_id, 0) + 1
            self._owners[delta.request_id] = identity
        return [command for command in commands if self._note(identity, client, command)], refused

    def deliver(self, deltas: list[SeqDelta]) -> None:
        """Send each client what its requests gained."""
        parts: Parts = {}
        for delta in deltas:
            owner = self._owners.get(delta.request_id)
            if owner is None:
                continue
            parts.setdefault(owner, []).append(delta)
            if delta.finish_reason is not None:
                self._count_end(owner, delta.request_id)
        for owner, own in parts.items():
            self._send(owner, encode(StepOutputs(own)))

    def broadcast(self, outputs: StepOutputs) -> None:
        """Send the same to every client. It also finds out who is gone."""
        message = encode(outputs)
        for identity, client in list(self._clients.items()):
            if not client.is_cut:
                self._send(identity, message)
            elif self._send(identity, encode(ClientCut())):
                client.is_cut = False

    def answer(self, answer: Explained | Done) -> None:
        """To the client that has asked."""
        identity = self._askers.pop(answer.ticket, None)
        if identity is not None:
            self._send(identity, encode(answer))

    def tell(self, ticket: int, event: Event) -> bool:
        """To the client that has asked to be told of such; False, and it is forgotten, if it is gone or does not
        read."""
        identity = self._askers.get(ticket)
        if identity is not None and self._send(identity, encode(event)):
            return True
        self._askers.pop(ticket, None)
        return False

    def take_orphans(self) -> list[str]:
        """Requests whose client is gone or was cut off since the last call: they are to be cancelled."""
        orphans, self._orphans = self._orphans, []
        return orphans

    def close(self) -> None:
        """Free the socket once what was sent has left."""
        self._socket.close()

    def _note(self, identity: bytes, client: _Client, command: Command) -> bool:
        """Keep the books; False for what the loop need not see."""
        match command:
            case Submit(request):
                client.n_open[request.request_id] = request.params.n
                self._owners[request.request_id] = identity
            case Cancel(request_ids):
                for request_id in request_ids:
                    client.n_open.pop(request_id, None)
                    self._owners.pop(request_id, None)
            case CancelSeq(request_id, _):
                self._count_end(identity, request_id)
            case (
                Explain() | FollowPrefixes() | ResetPrefixCache() | Sleep() | WakeUp() | LoadAdapter() | UnloadAdapter()
            ):
                self._askers[command.ticket] = identity
            case Hello():
                self._send(identity, self._ready)
                return False
        return True

    def _count_end(self, owner: bytes, request_id: str) -> None:
        client = self._clients[owner]
        n_open = client.n_open.get(request_id, 0)
        if n_open > 1:
            client.n_open[request_id] = n_open - 1
        else:
            client.n_open.pop(request_id, None)
            self._owners.pop(request_id, None)

    def _send(self, identity: bytes, message: bytes) -> bool:
        client = self._clients.get(identity)
        if client is None:
            return False
        try:
            self._socket.send_multipart((identity, message), zmq.DONTWAIT)
            return True
        except zmq.Again:
            if not client.is_cut:
                logger.error("a client does not read: %d requests of it are cancelled", len(client.n_open))
            client.is_cut = True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if client.n_open:
                logger.warning("a client is gone: %d requests of it are cancelled", len(client.n_open))
            del self._clients[identity]
        self._orphans += client.n_open
        for request_id in client.n_open:
            self._owners.pop(request_id, None)
        client.n_open = {}
        return False
