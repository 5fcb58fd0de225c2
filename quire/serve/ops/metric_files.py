"""What several API processes count together: each leaves its counts in a file, and whoever is asked adds them up.

Owns the files. Does not own what is counted (`metrics.py`).
Invariant: a process writes only its own file, whole and atomically, and only growing counts, so that the sum never goes
back whichever process answers; a process that is started again goes on from the file of the one before.
"""

from __future__ import annotations

import contextlib
import os
import pathlib

import msgspec

Labels = tuple[str, str, str]


class ProcessCounts(msgspec.Struct):
    """Everything that one process has counted."""

    histograms: dict[str, tuple[list[int], float]] = {}
    """Name → counts by bucket, sum of values."""
    answers: list[tuple[Labels, int]] = []
    """HTTP answers by route, method and status."""
    lost_clients: dict[str, int] = {}
    """Requests whose client left before the answer was complete, by route."""
    process: int = 0
    """Number of the process."""
    loop: dict[str, tuple[list[int], float, float]] = {}
    """Lag of its event loop: cause → counts by bucket, sum, largest value."""
    ignored: dict[str, int] = {}
    """Fields of requests that do nothing, by name."""


class MetricFiles:
    """The folder with the files of all processes."""

    def __init__(self, folder: str, index: int) -> None:
        self._folder = pathlib.Path(folder)
        self._own = self._folder / f"metrics-{index}"

    def own(self) -> ProcessCounts:
        """What the process before this one had counted."""
        return _read(self._own)

    def exchange(self, counts: ProcessCounts) -> list[ProcessCounts]:
        """Leave `counts`; returns those of the others. A disk that is full keeps the older ones."""
        with contextlib.suppress(OSError):
            fresh = self._own.with_suffix(".new")
            fresh.write_bytes(msgspec.msgpack.encode(counts))
            os.replace(fresh, self._own)
        names = [path for path in self._folder.glob("metrics-*") if path.suffix != ".new" and path != self._own]
        return [_read(path) for path in sorted(names)]


def _read(path: pathlib.Path) -> ProcessCounts:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=ProcessCounts)
    except (OSError, msgspec.DecodeError):
        return ProcessCounts()
