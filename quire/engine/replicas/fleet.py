"""`Fleet`: what starts replicas and gives requests to them, as `ReplicaLink` sees it. Ray's is `ray.py`."""

from __future__ import annotations

from typing import Protocol

from quire.core.errors import EngineLost
from quire.engine.replicas.channel import EndpointAddress

GONE = "the replica that ran this request is gone; others serve: send the request again"


class ReplicaLost(EngineLost):
    """The replica that ran a request is gone, or its engine is."""

    def __init__(self, message: str, *, is_gone: bool) -> None:
        """is_gone: the whole replica."""
        super().__init__(message)
        self.is_gone = is_gone


class Fleet(Protocol):
    """Replicas that call back into one endpoint."""

    async def start(self, address: EndpointAddress) -> None:
        """Have the replicas started, which speak to `address`. ConfigError once it is known that they cannot be."""

    async def run(self, wire_id: str, message: bytes) -> None:
        """Have a replica run the Submit in `message`, once one has room; returns when all of it was sent. Raises
        ReplicaLost. When this task is cancelled the replica stops."""

    @property
    def failure(self) -> str | None:
        """Why there is no replica and none will come."""
