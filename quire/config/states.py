"""What a recurrent mixer keeps of a sequence, whatever its length, and what that takes. Torch-free.

Owns the description of states. Does not own their lines (`compute/runner/states`) nor snapshots (`control`).
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

EXACT_BYTES: Final = 4
PIECE: Final = 64
"""Most rows of a sequence that kernels take at once: the side of the triangles that are solved, or multiplied."""


class StatePart(msgspec.Struct, frozen=True):
    """Numbers of one layer and sequence."""

    shape: tuple[int, ...]
    is_exact: bool = False
    """In float32, whatever the model's type is: they are added to at every token."""

    def n_bytes(self, itemsize: int) -> int:
        """itemsize: of an activation."""
        return math.prod(self.shape) * (EXACT_BYTES if self.is_exact else itemsize)


class StateSpec(msgspec.Struct, frozen=True):
    """All of one layer."""

    parts: tuple[StatePart, ...]

    def n_bytes(self, itemsize: int) -> int:
        """See `StatePart.n_bytes`."""
        return sum(part.n_bytes(itemsize) for part in self.parts)
