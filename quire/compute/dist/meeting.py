"""Where ranks meet: a file of one machine, or a store of addresses that ranks of several machines reach.

Owns both. Does not own how a meeting point is spelled (`core/meeting.py`).
"""

from __future__ import annotations

import datetime
import socket
from typing import Any, Final

import torch.distributed

from quire.core.meeting import meeting_of

STORE_S: Final = 60.0
"""The store is there before a rank is told of it."""
_DISTRIBUTED: Final[Any] = torch.distributed
"""Whose types leave out the classes of groups."""


def host_store(address: str) -> tuple[object, int]:
    """A store of this process, as long as it is kept, and its port. address: of this machine. OSError: it is not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family)
    port = int(listening.getsockname()[1])
    made = _DISTRIBUTED.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return made, port


def store_of(meeting_point: str, size: int) -> Any:
    """Through which `size` ranks find one another."""
    meeting = meeting_of(meeting_point)
    if meeting is None:
        return _DISTRIBUTED.FileStore(meeting_point, size)
    timeout = datetime.timedelta(seconds=STORE_S)
    store = _DISTRIBUTED.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return _DISTRIBUTED.PrefixStore(meeting.name, store)
