"""Bytes between API processes and the engine process: msgpack of the values in `core.commands` and `events`, no more.

The socket is `ipc://` in a folder that only its owner can enter. To the process that started it an engine writes lines
of JSON into a pipe.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import msgspec

from quire.config.engine import EngineConfig
from quire.core.commands import Command
from quire.core.errors import ConfigError
from quire.core.events import EngineEnd, Event, Status
from quire.engine.owned_folders import OwnedFolder

SHUTDOWN_LINE = b"shutdown\n"
"""On an engine's standard input: leave."""
SOCKET = "engine"
"""Its name in the folder."""
SOCKET_FOLDER = "quire-"
"""What the folder's name begins with."""
MAX_PATH_BYTES = 107
"""Of a Unix socket's path."""
OTHER_PLACES = ("/tmp", "/dev/shm")
"""For the folder, where the usual place for temporary files does not do."""

encode = msgspec.msgpack.Encoder().encode
decode_commands: Callable[[bytes], list[Command]] = msgspec.msgpack.Decoder(list[Command]).decode
decode_event: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
decode_status: Callable[[bytes], Status] = msgspec.json.Decoder(Status).decode
encode_status = msgspec.json.Encoder().encode


class ProcessStart(msgspec.Struct):
    """First line on the engine process's standard input, as JSON."""

    address: str
    """Where the engine listens."""
    status_fd: int
    """The pipe to its parent; -1: none."""
    config: EngineConfig
    recorder_fd: int = -1
    """Memory for its `FlightRecorder`; -1: none."""
    engine: int = 0
    """Its number."""
    n_restarts_left: int = 0
    """Engines that may still be started after it."""
    ends: list[EngineEnd] = []
    """Of those before it, oldest first."""


def socket_folder() -> OwnedFolder:
    """A fresh folder for the socket. ConfigError if there is no place for it."""
    found = []
    try:
        places = dict.fromkeys((tempfile.gettempdir(), *OTHER_PLACES))
    except FileNotFoundError as error:  # it writes a file in each to try
        found.append(str(error.strerror))
        places = dict.fromkeys(OTHER_PLACES)
    for place in places:
        try:
            folder = OwnedFolder(SOCKET_FOLDER, place)
        except OSError as error:
            found.append(f"{place}: {error.strerror}")
            continue
        if len(os.fsencode(folder.path / SOCKET)) <= MAX_PATH_BYTES:
            return folder
        folder.remove()
        found.append(f"{place}: the path of a socket in it is longer than the {MAX_PATH_BYTES} bytes allowed")
    raise ConfigError(f"there is no folder for the engine's socket ({'; '.join(found)}): set TMPDIR to another one")
