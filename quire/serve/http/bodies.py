"""Memory for request bodies: how many bytes of large ones may be in this process at once, until they are decoded.

Does not own reading (`exchange.py`) nor decoding. Invariant: a small body always finds room, so that a few clients with
large ones do not keep the others out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from quire.core.errors import QueueFull

SMALL_BYTES = 64 * 1024
"""Of each body so much is not counted."""


class BodyMemory:
    """Room for `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.n_bytes = 0
        """Bytes counted now."""

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Room for one body, as long as the context lasts. Yields what is to be told how many bytes there are so far;
        it raises QueueFull when there is no room for them."""
        held = 0

        def grow(n_bytes: int) -> None:
            nonlocal held
            more = max(0, n_bytes - SMALL_BYTES) - held
            if more > 0 and self.n_bytes + more > self._limit:
                raise QueueFull(
                    f"bodies of {self.n_bytes} bytes are being read, {self._limit} may be at once: try again later"
                )
            held, self.n_bytes = held + more, self.n_bytes + more

        try:
            yield grow
        finally:
            self.n_bytes -= held
