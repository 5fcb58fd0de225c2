"""The port at which nodes come to node 0, and what is heard of somebody before it is known who that is.

Does not own which node is wanted (`nodes.py`). Invariant: a stranger costs little memory, and a few seconds.
"""

from __future__ import annotations

import os
import socket
from typing import Final

import msgspec

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, shown
from quire.engine.ranks.node_wire import Frames, Hello, Kind, Torn

LOOK_S: Final = 0.1
HELLO_S: Final = 5.0
"""So long for the greeting, and for what follows."""
HELLO_BYTES: Final = 4096
"""It has some hundred."""


def listening(config: EngineConfig) -> socket.socket:
    """Whose accept waits `LOOK_S`. Raises ConfigError where the address is not of this machine, or the port taken, or
    this is not node 0."""
    if config.node_rank:
        raise ConfigError(
            f"node_rank = {config.node_rank}, and an engine is on node 0: leave node_rank out here, and have the others"
            " run --headless, which hold ranks for it", param="node_rank",
        )  # fmt: skip
    address, port = config.master_addr, config.master_port
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((address, port), family=family)
    except socket.gaierror as error:
        raise ConfigError(
            f"master_addr = {shown(address)} is not known here ({error.strerror}): give an address of this machine, at"
            " which the other nodes reach it", param="master_addr",
        ) from None  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"master_addr = {shown(address)}, master_port = {port} cannot be listened on"
            f" ({os.strerror(error.errno or 0)}): give an address of this machine, at which the other nodes reach it,"
            " and a port that is free", param="master_port",
        ) from None  # fmt: skip
    found.settimeout(LOOK_S)
    return found


def hello_of(frames: Frames) -> Hello:
    """Who has come. OSError or msgspec.DecodeError: it is no node, or does not say so in time."""
    frames.greet()
    if not frames.is_greeted(HELLO_S):
        raise Torn("it does not say that it is a node")
    kind, body = frames.receive(HELLO_S, HELLO_BYTES)
    if kind is not Kind.HELLO:
        raise Torn(f"it begins with {kind.name}")
    return msgspec.msgpack.decode(body, type=Hello)
