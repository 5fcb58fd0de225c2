"""What is done about a Ray without its library: whether it listens, and what it leaves behind. Imports no Ray."""

from __future__ import annotations

import pathlib
import shutil
import socket
from typing import Final

CONNECT_S: Final = 5.0


def remove_session(folder: str) -> None:
    """Remove the folder of logs and sockets of a Ray that has ended, and the link that says that it is the latest."""
    session = pathlib.Path(folder)
    shutil.rmtree(session, ignore_errors=True)
    latest = session.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def knock(address: str) -> None:
    """OSError if nobody listens at HOST:PORT: Ray would try for minutes. Other addresses are left to Ray."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
