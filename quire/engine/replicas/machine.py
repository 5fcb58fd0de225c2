"""What is done about a Ray without its library: whether it listens. Imports no Ray."""

from __future__ import annotations

import socket
from typing import Final

CONNECT_S: Final = 5.0


def knock(address: str) -> None:
    """OSError if nobody listens at HOST:PORT: Ray would try for minutes. Other addresses are left to Ray."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
