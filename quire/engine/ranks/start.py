"""The first line that a rank's process reads, and the only one that it writes.

Owns both. A process that reads them has no torch yet.
"""

from __future__ import annotations

import msgspec

from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.core.events import EndKind


class RankStart(msgspec.Struct):
    """First line on a rank's standard input, as JSON."""

    rank: int
    shape: Mesh
    config: EngineConfig
    folder: str
    """The checkpoint, whatever `config.model` calls it."""
    meeting_point: str
    memory_fd: int
    bell_fd: int
    status_fd: int
    """The pipe to rank 0."""
    is_server: bool
    results_fd: int = -1
    """Memory for results; of the rank that says them, where that is not rank 0."""
    results_bell_fd: int = -1

    @property
    def fds(self) -> list[int]:
        """To be inherited."""
        own = self.memory_fd, self.bell_fd, self.status_fd, self.results_fd, self.results_bell_fd
        return [fd for fd in own if fd >= 0]


class RankFailed(msgspec.Struct):
    """The only line that a rank ever writes to rank 0: it cannot go on."""

    message: str
    kind: EndKind
