"""What an endpoint knows of the prefixes of its replicas, and how right that was. Plain figures, for people."""

from __future__ import annotations

import msgspec


class ReplicaRouting(msgspec.Struct):
    """One replica, as whoever chooses sees it."""

    name: str
    n_open: int = 0
    """Sequences that were sent there and have not ended."""
    prefix_pages: int = 0
    """Pages that it has said it holds."""
    coming_pages: int = 0
    """Pages of requests that were sent there, of which it has not said yet that it holds them."""
    is_known: bool = False
    """It says what it holds, and nothing of that was lost; False: what was sent there counts meanwhile."""


class RoutingStats(msgspec.Struct):
    """Counters only grow."""

    replicas: list[ReplicaRouting] = []
    expected_tokens: int = 0
    """Prompt tokens that chosen replicas were expected to have, of requests that have a first token."""
    found_tokens: int = 0
    """Those that they found, expected or not."""
    missed_tokens: int = 0
    """Of those expected, not found."""
    pictures: int = 0
    """Times that a replica began to say all that it holds: for each engine that it had, and after each gap."""
    gaps: int = 0
    """Times that something of what a replica said was lost."""
