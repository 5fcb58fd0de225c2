"""How a node comes to node 0: where that is, how long it is looked for, what is said meanwhile; whose options hold.

Does not own what becomes of the connection (`node.py`), nor node 0's end of it (`node_port.py`). Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import pathlib
import socket
import time
from typing import Any, Final

import msgspec

from quire.config.command_line import dashed
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, shown
from quire.core.meeting import is_loopback
from quire.engine.ranks.node_wire import Frames, Hello, Kind, model_digest, versions

logger = logging.getLogger("quire.engine")

COME_S: Final = 600.0
"""Node 0 must listen within so much time, at first."""
AGAIN_S: Final = 60.0
"""And after its engine has ended: it is started again, or will never be."""
TRY_S: Final = 0.5
SAY_S: Final = 10.0
CONNECT_S: Final = 5.0
OWN_OPTIONS: Final = (
    "model", "revision", "download_dir", "tokenizer", "served_model_name", "chat_template", "node_rank", "master_addr",
    "num_threads",
)  # fmt: skip
"""Of each node; all others are those of node 0."""


def resolve(config: EngineConfig) -> None:
    """Raises ConfigError where the address of node 0 is a name that this machine does not know."""
    try:
        socket.getaddrinfo(config.master_addr, config.master_port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no name of a machine"
        raise ConfigError(
            f"--master-addr {shown(config.master_addr)} is not known here ({why}): give the address of node 0, or a"
            " name that this machine resolves",
            param="master_addr",
        ) from None


def connect(config: EngineConfig, *, is_first: bool) -> Frames:
    """The connection, of which node 0 has said that it is one. is_first: it has had no engine yet that this node was
    part of. Raises ConfigError if it does not listen in time."""
    address, wait_s = (config.master_addr, config.master_port), COME_S if is_first else AGAIN_S
    where = f"{address[0]} port {address[1]}"
    began_s = time.monotonic()
    say_s = began_s + TRY_S
    if is_first:
        logger.info("looking for node 0 at %s", where)
    while True:
        try:
            return _greeted(socket.create_connection(address, CONNECT_S), where)
        except OSError as error:
            now_s, why = time.monotonic(), error.strerror or str(error)
            advice = _advice(address[0], error) if is_first else "its engine was not started again"
            if now_s > began_s + wait_s:
                raise ConfigError(f"node 0 did not answer at {where} for {wait_s:g} s ({why}): {advice}") from None
            if now_s > say_s:
                left = f"{began_s + wait_s - now_s:.0f} s more"
                hint = f": {advice}" if is_first else ""
                logger.warning("waiting for node 0 at %s (%s), at most %s%s", where, why, left, hint)
                say_s = now_s + SAY_S
            time.sleep(TRY_S)


def _advice(host: str, error: OSError) -> str:
    """What to look at when node 0 does not answer."""
    if error.errno == errno.EAGAIN:
        return "node 0 is still starting, or another program has its --master-port"
    if is_loopback(host):
        return f"{host} is this machine itself; if node 0 is on another, give its address, as --master-addr on both"
    if error.errno == errno.ECONNREFUSED:
        return f"{host} is there, but nothing listens: is node 0 started, with this --master-addr and --master-port?"
    return f"is {host} node 0's address, is node 0 started, and does a firewall let this machine through?"


def _greeted(connection: socket.socket, where: str) -> Frames:
    """Raises ConfigError if that is not node 0; OSError if it says nothing, for node 0 has the port before it lets
    anybody in."""
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        frames = Frames(connection)
        try:
            is_node_0 = frames.is_greeted(CONNECT_S)
        except TimeoutError:
            raise TimeoutError(errno.EAGAIN, "it is listened on, and nothing is said") from None
        if not is_node_0:
            raise ConfigError(f"{where} answers, but not as node 0 of Quire does: is it the --master-port of node 0?")
        undo.pop_all()
    return frames


def greet(frames: Frames, config: EngineConfig, folder: pathlib.Path) -> None:
    """Say who this is. folder: its checkpoint."""
    hello = Hello(
        config.node_rank, config.nnodes, socket.gethostname(), versions(), model_digest(folder), given_options(config)
    )
    with contextlib.suppress(OSError):  # which is seen at once
        frames.greet()
        frames.send(Kind.HELLO, msgspec.msgpack.encode(hello))


def given_options(config: EngineConfig) -> dict[str, Any]:
    """Options of a node that must be those of node 0: all that are not its own, and not the usual ones."""
    usual, values = EngineConfig(), msgspec.msgpack.decode(msgspec.msgpack.encode(config))
    names = (name for name in EngineConfig.__struct_fields__ if name not in OWN_OPTIONS)
    return {name: values[name] for name in names if getattr(config, name) != getattr(usual, name)}


def difference(given: dict[str, Any], of_first: EngineConfig) -> str:
    """What is wrong with the `given_options` of a node that comes to node 0; empty if nothing is."""
    values = msgspec.msgpack.decode(msgspec.msgpack.encode(of_first))
    for name, value in given.items():
        if value != values.get(name):
            flag = dashed(name)
            of_node_0 = values.get(name)
            has = "the default" if not of_node_0 and of_node_0 is not False else shown(of_node_0)  # 0: it chooses
            return (
                f"it has {flag} {shown(value)}, and node 0 has {has}, whose options hold for all nodes: give it the"
                f" same, or leave {flag} out there"
            )
    return ""
