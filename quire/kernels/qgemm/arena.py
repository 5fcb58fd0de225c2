"""Memory of packed weights, on huge pages where the system gives them on request.

A product reads each weight once; with memory pages of 4 KB a seventh of one thread's bandwidth went into translating
addresses (docs/lab-notes.md, 15). Matrices follow one another in chunks, so that small ones share huge pages.
Invariant: a chunk lives as long as a tensor in it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import threading

import torch

CHUNK_BYTES = 1 << 26
HUGE_PAGE = 1 << 21
ALIGNMENT = 64
"""A cache line."""


class Arena:
    """Hands out memory of the chunk begun last; what does not fit begins another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with arbitrary contents."""
        n_bytes = math.prod(shape) * dtype.itemsize
        room = n_bytes + -n_bytes % ALIGNMENT
        with self._lock:
            if room > len(self._rest):
                self._rest = _chunk(max(room, CHUNK_BYTES))
            taken, self._rest = self._rest[:n_bytes], self._rest[room:]
        return taken.view(dtype).view(shape)


@functools.cache
def arena() -> Arena:
    """The arena of this process."""
    return Arena()


def _chunk(n_bytes: int) -> torch.Tensor:
    """Fresh memory; it takes none of the machine's until it is written."""
    whole = n_bytes + -n_bytes % HUGE_PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(whole, dtype=torch.uint8)
    memory = mmap.mmap(-1, whole + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    every_byte = torch.frombuffer(memory, dtype=torch.uint8)
    first = -every_byte.data_ptr() % HUGE_PAGE
    return every_byte[first : first + whole]
