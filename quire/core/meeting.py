"""What a meeting point of ranks is: `PATH` of a file that is not there, or, for ranks of several machines,
`tcp://HOST:PORT/OWN/NAME` with the address of a store, the address of this machine for the others, and a name.

Owns the spelling. Does not own the store (`compute/dist/meeting.py`). Invariant: what begins like a meeting point that
nobody else has is free, too; what is on one machine listens on the loopback interface alone.
"""

from __future__ import annotations

from typing import Final, NamedTuple

LOOPBACK: Final = "127.0.0.1"
SCHEME: Final = "tcp://"


def is_loopback(address: str) -> bool:
    """Whether only processes of the same machine reach it."""
    return address == "localhost" or address.startswith("127.") or address == "::1"


class Meeting(NamedTuple):
    """Of ranks of several machines."""

    host: str
    port: int
    own_address: str
    name: str


def meeting_at(host: str, port: int, own_address: str) -> str:
    """The meeting point of one machine's ranks. host, port: of the store."""
    return f"{SCHEME}{host}:{port}/{own_address}/meet"


def meeting_of(meeting_point: str) -> Meeting | None:
    """Its parts; None: all ranks are on this machine."""
    if not meeting_point.startswith(SCHEME):
        return None
    where, own_address, name = meeting_point.removeprefix(SCHEME).split("/", 2)
    host, _, port = where.rpartition(":")
    return Meeting(host, int(port), own_address, name)


def own_address(meeting_point: str) -> str:
    """At which other ranks reach those of this machine."""
    found = meeting_of(meeting_point)
    return LOOPBACK if found is None else found.own_address
