"""Either end of a connection between nodes, by hand."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
from typing import Any

import msgspec

import quire
from quire.engine.ranks.node_wire import Frames, Hello, Kind, model_digest, versions

HERE = "127.0.0.1"
DEMO = pathlib.Path(quire.__file__).parent / "_models" / "demo"


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(Hello(1, 2, "other", versions(), model_digest(DEMO)), **changes)


def come(port: int, said: Hello) -> Frames:
    """A node that has said who it is."""
    frames = Frames(socket.create_connection((HERE, port)))
    assert frames.is_greeted(5)
    frames.greet()
    frames.send(Kind.HELLO, msgspec.msgpack.encode(said))
    return frames


def answer(frames: Frames) -> tuple[Kind, bytes]:
    """What node 0 says but that it lives."""
    for _ in range(100):
        kind, body = frames.receive(10)
        if kind is not Kind.BEAT:
            return kind, body
    raise TimeoutError("nothing came but signs of life")


class Head(threading.Thread):
    """A node 0 that says one thing to whoever comes first, and closes the port."""

    def __init__(self, port: int, kind: Kind, body: bytes, listening: socket.socket | None = None) -> None:
        super().__init__(daemon=True)
        self.said: list[tuple[Kind, bytes]] = []
        """To START."""
        self._listening, self._kind, self._body = listening or socket.create_server((HERE, port)), kind, body
        self.start()

    def run(self) -> None:
        connection, _ = self._listening.accept()
        self._listening.close()
        frames = Frames(connection)
        frames.greet()
        assert frames.is_greeted(5) and frames.receive(5)[0] is Kind.HELLO
        frames.send(self._kind, self._body)
        with contextlib.suppress(OSError):
            while self._kind is Kind.START:
                self.said.append(frames.receive(5))
        frames.close()
