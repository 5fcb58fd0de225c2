"""Bytes between an API process and its engine process: msgpack of the values in `core.events`, nothing else.

The socket is `ipc://` in a folder that only its owner can enter.
"""

from __future__ import annotations

import pathlib
import tempfile

import msgspec

from quire.config.engine import EngineConfig
from quire.core.events import Command, Event

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_event = msgspec.msgpack.Decoder(Event).decode


class ProcessStart(msgspec.Struct):
    """First line on the engine process's standard input, as JSON."""

    address: str
    config: EngineConfig


def socket_folder() -> pathlib.Path:
    """A fresh folder with mode 0700 for the socket."""
    return pathlib.Path(tempfile.mkdtemp(prefix="quire-"))
