"""Memory that the ranks of an engine share: a ring of numbered messages from rank 0, and where each rank is.

Owns the layout. Does not own what messages say (`wire.py`) nor who watches (`group.py`).
Invariants: one process writes messages, each of the others reads all of them in order; nobody spins: a reader sleeps on
an eventfd of its own; a message may be longer than the ring, which is written as it is read.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from quire.core.errors import EngineError

RING_BYTES: Final = 1 << 20
CHECK_S: Final = 0.1
"""Between two looks at whether something still can come."""
FULL_S: Final = 0.0005
"""Between two looks at a full ring: it fills up only with prompts of hundreds of thousands of tokens."""
_WRITTEN: Final = 0
"""Index of the number of bytes written so far, of 8 bytes as all before the ring."""
_FIRST_RANK, _RANK_WORDS = 8, 8
_READ, _BEAT, _CALLS, _STATE, _DONE = range(5)
"""Of each rank: bytes read so far, time of the last sign of life, calls of its `Comm`, its state, and steps done."""
_HEAD: Final = struct.Struct("<QQ")
"""Before each message: its number, its bytes."""

STARTING, READY, IDLE, ORDERED, STEPPING = range(5)
"""States of a rank: not there yet; waiting for the others; with nothing to do; at an order; at a step."""


def memory_bytes(n_ranks: int) -> int:
    """Size of the memory."""
    return _ring_at(n_ranks) + RING_BYTES


def _ring_at(n_ranks: int) -> int:
    return 8 * (_FIRST_RANK + _RANK_WORDS * n_ranks)


def make_memory(n_ranks: int) -> int:
    """A descriptor of zeroed memory, to be inherited."""
    fd = os.memfd_create("quire-ranks")
    os.ftruncate(fd, memory_bytes(n_ranks))
    return fd


class Standing(NamedTuple):
    """Where a rank is, as it said last."""

    state: int
    silent_s: float
    """Since it said so."""
    n_calls: int
    """Of the group that shares its layers, that it has begun; of a rank without fellows, layers."""
    n_done: int
    """Steps that its device has done."""
    n_read: int = 0
    """Bytes of what rank 0 has said."""
    n_unread: int = 0
    """That wait for it."""

    @property
    def progress(self) -> tuple[int, int, int]:
        """What changes while it computes."""
        return self.n_calls, self.n_done, self.n_read


class RankMemory:
    """The words before the ring. Each is written by one process alone."""

    def __init__(self, fd: int, n_ranks: int) -> None:
        memory = memoryview(mmap.mmap(fd, memory_bytes(n_ranks)))
        self._words, self.ring = memory[: _ring_at(n_ranks)].cast("Q"), memory[_ring_at(n_ranks) :]
        self.n_ranks = n_ranks

    @property
    def written(self) -> int:
        """Bytes of messages."""
        return self._words[_WRITTEN]

    @written.setter
    def written(self, value: int) -> None:
        self._words[_WRITTEN] = value

    def read(self, rank: int) -> int:
        """Bytes that a rank has read."""
        return self._word(rank, _READ)

    def set_read(self, rank: int, value: int) -> None:
        """It has read so many."""
        self._set(rank, _READ, value)

    def state(self, rank: int) -> int:
        """One of the states."""
        return self._word(rank, _STATE)

    def set_state(self, rank: int, state: int) -> None:
        """It is at something else now."""
        self._set(rank, _STATE, state)

    def beat(self, rank: int, n_calls: int, n_done: int) -> None:
        """A sign of life."""
        self._set(rank, _CALLS, n_calls)
        self._set(rank, _DONE, n_done)
        self._set(rank, _BEAT, time.monotonic_ns())

    def standing(self, rank: int) -> Standing:
        """As it said last; the clock is one for all processes."""
        silent_s = (time.monotonic_ns() - self._word(rank, _BEAT)) / 1e9
        n_read = self.read(rank)
        return Standing(
            self.state(rank), silent_s, self._word(rank, _CALLS), self._word(rank, _DONE), n_read, self.written - n_read
        )

    def _word(self, rank: int, word: int) -> int:
        return self._words[_FIRST_RANK + _RANK_WORDS * rank + word]

    def _set(self, rank: int, word: int, value: int) -> None:
        self._words[_FIRST_RANK + _RANK_WORDS * rank + word] = value


class RingWriter:
    """Rank 0's end, or that of its node. bells: an eventfd for each reader."""

    def __init__(
        self, memory: RankMemory, bells: list[int], check: Callable[[], None], readers: Sequence[int] = ()
    ) -> None:
        """check: called while the ring is full; raises when nobody reads any more. readers: their numbers, without
        them from 1 on."""
        self._memory, self._bells, self._check = memory, bells, check
        self._readers = readers or range(1, 1 + len(bells))
        self._number = 0

    def put(self, data: bytes) -> None:
        """Write a message for every reader. Returns when it is in the ring to its end."""
        left = memoryview(_HEAD.pack(self._number, len(data)) + data)
        self._number += 1
        while left:
            written = self._memory.written
            n_free = RING_BYTES - (written - self._least_read())
            at = written % RING_BYTES
            n = min(len(left), n_free, RING_BYTES - at)
            if not n:
                self._check()
                time.sleep(FULL_S)
                continue
            self._memory.ring[at : at + n] = left[:n]
            self._memory.written = written + n  # after the bytes: readers look at it first
            left = left[n:]
            for bell in self._bells:
                os.eventfd_write(bell, 1)

    def _least_read(self) -> int:
        return min((self._memory.read(rank) for rank in self._readers), default=self._memory.written)


class RingReader:
    """Another rank's end."""

    def __init__(self, memory: RankMemory, rank: int, bell: int, check: Callable[[], None] | None = None) -> None:
        """check: called now and then while nothing comes; raises when nothing will. None: nothing is expected to end
        the wait but the end of the process."""
        self._memory, self._rank, self._bell, self._check = memory, rank, bell, check
        self._number = 0
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)

    def get(self) -> bytes:
        """The next message, whenever it comes. EngineError if one was lost."""
        number, n_bytes = _HEAD.unpack(self._take(_HEAD.size))
        if number != self._number:
            raise EngineError(f"message {self._number} was expected and number {number} came")
        self._number += 1
        return self._take(n_bytes)

    def has_more(self, timeout_s: float | None) -> bool:
        """Whether a message has begun to come, in so much time; None: however long it takes."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._memory.written == self._memory.read(self._rank):
            left_s = CHECK_S if end_s is None else end_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait(min(left_s, CHECK_S))
        return True

    def _wait(self, most_s: float) -> None:
        """Until the writer rings; with a check no longer than that."""
        if self._check is None or self._poll.poll(math.ceil(most_s * 1000)):
            os.eventfd_read(self._bell)
        else:
            self._check()

    def _take(self, n_bytes: int) -> bytes:
        pieces = []
        while n_bytes:
            read = self._memory.read(self._rank)
            at = read % RING_BYTES
            n = min(n_bytes, self._memory.written - read, RING_BYTES - at)
            if not n:
                self._wait(CHECK_S)
                continue
            pieces.append(bytes(self._memory.ring[at : at + n]))
            self._memory.set_read(self._rank, read + n)
            n_bytes -= n
        return b"".join(pieces)
