"""What adapters of one matrix are kept as on a GPU, and which rows of a step have which.

Owns `Stack`: all in tensors whose addresses stay, as steps are captured. A CPU has each by itself (`places`). A place
is where an adapter is, 0 and up; rows of -1 have none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

TILE: Final = 16
"""Rows that a program multiplies at once, all of one adapter."""
LARGE_TILE, MANY_ROWS = 64, 512
"""Rows that a program takes, one `TILE` after another, in steps of more than so many rows."""
BLOCK_OUT: Final = 256
"""Outputs that a program of the second product makes, all of one part."""

FUSED_RANKS: Final = (16, 32, 64)
"""Largest ranks that a stack may have room for where a product adds adapters itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Adapters of a matrix [n, k] of several parts, one under another: y[:, part] += B_part (A_part x)."""

    a: torch.Tensor
    """[n_places, n_parts * most, k], those of a part one behind another."""
    b: torch.Tensor
    """[n_places, n, most], the scale multiplied in."""
    ranks: torch.Tensor
    """int32 [n_places, n_parts]: how much of both counts, zeros are behind it; 0: the part has no adapter."""
    blocks: torch.Tensor
    """int32 [n_blocks, 3]: part, and the first and last output of up to `BLOCK_OUT`."""
    sizes: tuple[int, ...]
    """Outputs of each part."""

    @property
    def most(self) -> int:
        """Largest rank that there is room for."""
        return self.b.shape[2]


def blocks_of(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """For `Stack.blocks`."""
    starts = [0, *itertools.accumulate(sizes)]
    return [
        (part, first, min(first + BLOCK_OUT, end))
        for part, (start, end) in enumerate(itertools.pairwise(starts))
        for first in range(start, end, BLOCK_OUT)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a step in the order of their adapters."""

    order: torch.Tensor
    """int32 [n]: the rows, those of an adapter together."""
    tiles: torch.Tensor
    """int32 [n_tiles, 3]: place, -1: none; first of `order`, how many; 0 rows: there is no more, and no such place."""
    places: torch.Tensor | None = None
    """int32 [n]: of each row, -1: none; for those who sort rows again."""


def tile_of(n_rows: int) -> int:
    """Rows of a tile in a step with so many rows."""
    return TILE if n_rows <= MANY_ROWS else LARGE_TILE


def most_tiles(n_rows: int, n_places: int) -> int:
    """Of a step with so many rows; those without an adapter have tiles too."""
    return min(n_rows, n_places + 1 + n_rows // tile_of(n_rows))


def tiles_room(n_rows: int, n_places: int) -> int:
    """At least `most_tiles` of any step with at most so many rows."""
    return min(n_rows, n_places + 1 + n_rows // TILE)


def tiles_of(places: np.ndarray, n_tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """places: of each row, int [n] → what `Tiles` has, `n_tiles` of them, at least `most_tiles`."""
    order = np.argsort(places, kind="stable").astype(np.int32)
    tiles = np.zeros((n_tiles, 3), np.int32)
    tiles[:, 0] = -1
    found, counts = np.unique(places, return_counts=True)
    first = at = 0
    tile = tile_of(len(places))
    for place, count in zip(found.tolist(), counts.tolist(), strict=True):
        for start in range(0, count, tile):
            tiles[at] = place, first + start, min(tile, count - start)
            at += 1
        first += count
    return order, tiles
