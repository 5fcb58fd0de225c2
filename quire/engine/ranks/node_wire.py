"""What nodes of one engine say to each other: frames over a TCP connection, each with a kind and a body.

Owns both. Does not own what becomes of them (`nodes.py` on node 0, `node.py` on the others), nor the messages for ranks
that pass through (`wire.py`, `results.py`).
Invariants: nothing is believed before `MAGIC`, with which nothing else begins; a frame has a length, and one that is
too long is refused before it is read.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.metadata
import pathlib
import socket
import struct
import threading
import time
from typing import Any, Final

import msgspec

from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.core.events import EndKind
from quire.core.version import __version__
from quire.engine.ranks.ring import Standing

MAGIC: Final = b"quire-nodes-1\n"
"""Both ends begin with it."""
BEAT_S: Final = 0.25
"""No end says nothing for longer."""
MAX_BYTES: Final = 1 << 30
OTHERS_S: Final = 0.1
"""A thread that sends takes less, unless nobody hears it."""
_HEAD: Final = struct.Struct("<IB")
"""Before each body: its bytes, its kind."""


@enum.unique
class Kind(enum.IntEnum):
    """Of a frame. The first are of node 0, then those of the others."""

    BEAT = 0
    """Of both: nothing but a sign of life."""
    START = 1
    """`NodeStart`."""
    REFUSED = 2
    """Text: why this node is not wanted."""
    SAID = 3
    """A message for every rank, as it goes into their ring."""
    STACKS = 4
    """Number of a rank: end it so that its stacks are written."""
    BYE = 5
    """The engine is ended, and none will follow."""
    HELLO = 6
    """`Hello`."""
    STARTED = 7
    """`Started`."""
    STANDINGS = 8
    """`dict[int, Standing]`: where each rank is."""
    ENDED = 9
    """`RankEnded`."""
    RESULT = 10
    """Number of a rank, two bytes, and what it said of a step."""
    STACKS_OF = 11
    """`StacksOf`."""
    LEAVES = 12
    """Text: why this node ends."""
    LOST = 13
    """Text, of node 0: why its engine cannot go on."""


class Hello(msgspec.Struct):
    """First frame of a node that is not node 0."""

    node: int
    n_nodes: int
    host: str
    """What it calls itself."""
    versions: dict[str, str]
    """Of what must be alike."""
    model: str
    """See `model_digest`."""
    options: dict[str, Any] = {}
    """See `arrival.given_options`."""


class NodeStart(msgspec.Struct):
    """Start your ranks."""

    shape: Mesh
    config: EngineConfig
    store_address: str
    store_port: int
    is_server: bool


class Started(msgspec.Struct):
    """They are started."""

    pids: dict[int, int]
    """By rank."""


class RankEnded(msgspec.Struct):
    """One has ended, or cannot go on."""

    rank: int
    message: str
    kind: EndKind
    said: str = ""
    """What it wrote to its log at last."""
    may_be_another: bool = False
    """It may have failed because another rank is gone."""


class StacksOf(msgspec.Struct):
    """What a rank has written when it was ended."""

    rank: int
    text: str


def encode_standings(standings: dict[int, Standing]) -> bytes:
    """Body of STANDINGS."""
    return msgspec.msgpack.encode({rank: tuple(standing) for rank, standing in standings.items()})


def decode_standings(body: bytes) -> dict[int, Standing]:
    """See `encode_standings`."""
    return {rank: Standing(*fields) for rank, fields in _standings.decode(body).items()}


_standings: Final = msgspec.msgpack.Decoder(dict[int, tuple[int, float, int, int, int, int]])


def versions() -> dict[str, str]:
    """Of packages that nodes must have alike."""
    return {"quire": __version__, "torch": importlib.metadata.version("torch")}


def model_digest(checkpoint: pathlib.Path) -> str:
    """Tells models apart by config.json, and the names and sizes of their weights. checkpoint: a folder or file."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))
    found = hashlib.sha256()
    config = checkpoint / "config.json"
    if config.is_file():
        found.update(config.read_bytes())
    for file in files:
        found.update(f"{file.name} {file.stat().st_size}\n".encode())
    return found.hexdigest()


class Torn(OSError):
    """The connection has ended, or what comes is not of a node."""


class Frames:
    """A connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        """OSError: it has ended already; it is to be closed."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._socket = connection
        self._sending = threading.Lock()
        self.own_address, self.other_address = str(connection.getsockname()[0]), str(connection.getpeername()[0])

    def greet(self) -> None:
        """Say what this is."""
        self._socket.sendall(MAGIC)

    def is_greeted(self, limit_s: float) -> bool:
        """Whether the other end is one of these. OSError: it says nothing, or not so much, or has ended."""
        try:
            return self._take(len(MAGIC), time.monotonic() + limit_s) == MAGIC
        finally:
            self._socket.settimeout(None)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Returns when the system has it. OSError: the connection has ended."""
        with self._sending:
            self._socket.sendall(_HEAD.pack(len(body), kind) + body)

    def send_at_once(self, kind: Kind, body: bytes) -> None:
        """If there is room for it; waits for nobody. To be followed by `cut`: it may have gone in part."""
        if self._sending.acquire(timeout=OTHERS_S):
            try:
                self._socket.send(_HEAD.pack(len(body), kind) + body, socket.MSG_DONTWAIT)
            except OSError:
                return
            finally:
                self._sending.release()

    def receive(self, limit_s: float | None = None, max_bytes: int = MAX_BYTES) -> tuple[Kind, bytes]:
        """The next frame. Torn if there will be none, TimeoutError if it has not come in time, all of it; a limit holds
        for those who send meanwhile, too."""
        self._socket.settimeout(limit_s)
        end_s = None if limit_s is None else time.monotonic() + limit_s
        n_bytes, kind = _HEAD.unpack(self._take(_HEAD.size, end_s))
        if n_bytes > max_bytes or kind not in Kind.__members__.values():
            raise Torn(f"a frame of kind {kind} with {n_bytes} bytes (at most {max_bytes}) is none of Quire's")
        return Kind(kind), self._take(n_bytes, end_s)

    def cut(self) -> None:
        """End it for both ends, and whatever waits in it (idempotent)."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was ended
            return

    def close(self) -> None:
        """Free it; nobody waits in it any more."""
        self.cut()
        self._socket.close()

    def _take(self, n_bytes: int, end_s: float | None) -> bytes:
        data = bytearray()
        while len(data) < n_bytes:
            if end_s is not None:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("timed out")
                self._socket.settimeout(left_s)
            more = self._socket.recv(min(n_bytes - len(data), 1 << 20))
            if not more:
                raise Torn("the connection was closed")
            data += more
        return bytes(data)
