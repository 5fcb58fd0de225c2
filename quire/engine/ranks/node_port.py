"""The port at which nodes come to node 0, and what is heard of somebody before it is known who that is.

Does not own which node is wanted (`nodes.py`). Invariant: a stranger costs little memory, and a few seconds.
"""

from __future__ import annotations

import contextlib
import errno
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
HELLO_BYTES: Final = 65_536
"""It has some hundred, and what options have."""


def listening(config: EngineConfig) -> socket.socket:
    """Where nodes come. Raises ConfigError where the address is not of this machine, or the port taken, or this is not
    node 0."""
    if config.node_rank:
        raise ConfigError(
            f"node_rank = {config.node_rank}, and an engine is on node 0: leave node_rank out here, and have the others"
            " run --headless, which hold ranks for it", param="node_rank",
        )  # fmt: skip
    return _bound(config)


def check_address(config: EngineConfig) -> None:
    """Raises ConfigError where node 0's address is none of this machine, which is node 0, or the port taken: before
    anything is loaded. A node that comes in this moment comes again."""
    _bound(config).close()


def _bound(config: EngineConfig) -> socket.socket:
    address, port = config.master_addr, config.master_port
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no name of a machine"
        raise ConfigError(
            f"master_addr = {shown(address)} is not known here ({why}): give an address of this machine, at which the"
            " other nodes reach it", param="master_addr",
        ) from None  # fmt: skip
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"master_port = {port} of {address} is in use: stop what uses it, or give another --master-port, the"
                " same to all nodes", param="master_port",
            ) from None  # fmt: skip
        raise ConfigError(
            f"master_addr = {shown(address)} cannot be listened on ({os.strerror(error.errno or 0)}): give an address"
            " of this machine, at which the other nodes reach it", param="master_addr",
        ) from None  # fmt: skip


def reserved_port() -> socket.socket:
    """A free port of this machine that nobody else is given as long as this is kept; whoever is told of it may listen
    on it."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("", 0))
    return found


def close_listening(listening: socket.socket) -> None:
    """End it, and whatever waits in it (idempotent)."""
    with contextlib.suppress(OSError):  # it is closed
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def likely_address() -> str:
    """Of this machine, from which it would speak to others; empty where it speaks to nobody. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect(("192.0.2.1", 9))  # no machine has it
        except OSError:
            return ""
        return str(found.getsockname()[0])


def hello_of(frames: Frames) -> Hello:
    """Who has come. OSError or msgspec.DecodeError: it is no node, or does not say so in time."""
    frames.greet()
    if not frames.is_greeted(HELLO_S):
        raise Torn("it does not say that it is a node")
    kind, body = frames.receive(HELLO_S, HELLO_BYTES)
    if kind is not Kind.HELLO:
        raise Torn(f"it begins with {kind.name}")
    return msgspec.msgpack.decode(body, type=Hello)
