"""Memory that each GPU of a host shares with the others, through which their sums go. Owns its size and layout; whose
they are: `compute/dist/peers` and `kernels/reduce/hopper`.
"""

from __future__ import annotations

import dataclasses
from typing import Final

MAX_RANKS: Final = 8
CELL_BYTES: Final = 16
"""That a thread moves. Messages and rows are whole multiples of it, at such addresses."""
MAX_ROW_CELLS: Final = 4096
"""Of a row with a norm: eight blocks of 512 threads."""
CONTROL_BYTES: Final = 1024
"""These as in csrc/cuda/reduce/peers.h."""
PARITIES: Final = 2
"""A sum writes where the one before did not."""
PART_STEP: Final = 32
"""Cells of which a part is a multiple."""
HOP_BYTES: Final = 384 << 10
"""What a GPU sends in the time that a second hop takes: 1.2 us of the 322 GB/s that were measured on four H200s."""
LONGEST_BYTES: Final = 64 << 20
"""Of a sum in one launch; longer ones are several."""
PAIR_BYTES: Final = 4 << 20
"""Of the longest sum of two ranks in one hop: two move as many bytes, but sum half of them on each."""


def one_shot_bytes(size: int) -> int:
    """The longest sum of so many ranks that goes in one hop. A second spares (n - 1) (n - 2) / n times its bytes."""
    return PAIR_BYTES if size <= 2 else HOP_BYTES * size // ((size - 1) * (size - 2))


def sent_to_all_bytes(size: int) -> int:
    """The longest term of so many ranks that a product sends to all, so that no second hop is left."""
    return PAIR_BYTES // 2 if size <= 2 else one_shot_bytes(size)


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLayout:
    """Of one rank's memory: parts of sums in one hop, from each rank in turn, then the whole of sums in two, then their
    parts; all for each parity."""

    size: int
    """Ranks."""
    one_shot: int
    """Bytes of the longest sum that goes in one hop."""
    longest: int = LONGEST_BYTES

    @property
    def part_cells(self) -> int:
        """Of one rank: a sum in one hop."""
        return _stepped(self.one_shot // CELL_BYTES + MAX_ROW_CELLS)

    @property
    def whole_cells(self) -> int:
        """Of the longest sum."""
        return self.longest // CELL_BYTES

    @property
    def whole_at(self) -> int:
        """Where wholes begin, in bytes."""
        return CONTROL_BYTES + PARITIES * self.size * self.part_cells * CELL_BYTES

    @property
    def sent_at(self) -> int:
        """Where parts of sums in two hops begin, in bytes."""
        return self.whole_at + PARITIES * self.whole_cells * CELL_BYTES

    @property
    def sent_cells(self) -> int:
        """Of one rank: its share of a sum in two hops, or what a product of its sends to every rank."""
        return _stepped(self.whole_cells // self.size + MAX_ROW_CELLS)

    @property
    def n_bytes(self) -> int:
        """All of it."""
        return self.sent_at + PARITIES * self.size * self.sent_cells * CELL_BYTES


def _stepped(cells: int) -> int:
    return -(-cells // PART_STEP) * PART_STEP


def peer_bytes(size: int) -> int:
    """What a rank of so many keeps on its GPU; 0 where they do not sum so."""
    return PeerLayout(size, one_shot_bytes(size)).n_bytes if 2 <= size <= MAX_RANKS else 0
