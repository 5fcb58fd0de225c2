"""Bytes between API processes and the engine process: msgpack of the values in `core.events`, nothing else.

The socket is `ipc://` in a folder that only its owner can enter. To the process that started it an engine writes lines
of JSON into a pipe.
"""

from __future__ import annotations

import pathlib
import tempfile

import msgspec

from quire.config.engine import EngineConfig
from quire.core.events import Command, Event, Status

SHUTDOWN_LINE = b"shutdown\n"
"""On an engine's standard input: leave."""

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
decode_status = msgspec.json.Decoder(Status).decode
encode_status = msgspec.json.Encoder().encode


class ProcessStart(msgspec.Struct):
    """First line on the engine process's standard input, as JSON."""

    address: str
    """Where the engine listens."""
    status_fd: int
    """The pipe to its parent; -1: none."""
    config: EngineConfig


def socket_folder() -> pathlib.Path:
    """A fresh folder with mode 0700 for the socket."""
    return pathlib.Path(tempfile.mkdtemp(prefix="quire-"))
