"""Cuts the spans of a step into tiles for a GPU: which rows, which keys, where partial results go. Host only, numpy.

A tile is (consecutive tokens of one span) x (a range of its keys); a program runs one tile for one KV head. Spans that
fit one small tile (decode) get small tiles, others large ones; the two kinds are launched apart. Long key ranges are
split when there are too few tiles to fill the chip, or a few are much longer than the rest: split tiles write partial
rows, which a second kernel merges in order of position.
Invariants: every (token, key it may see) is covered exactly once; splits begin at multiples of `KEY_STEP`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

KEY_STEP = 128
"""Splits begin at multiples of this, so any key block size up to it divides them."""
SHORTEST_SPLIT = 256
"""Keys; a shorter split costs more in merging than it gains."""
NO_SPLIT = 1 << 30

TILE_FIELDS = 8
"""q_row, n_tokens, slot, position of the first token, first key, end of keys, first partial row or -1, unused."""
MERGE_FIELDS = 4
"""First partial row, rows from one split to the next, number of splits, output row * group + head in the group."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What the cutting depends on besides the spans."""

    group: int
    """Query heads of one KV head."""
    n_kv_heads: int
    small_rows: int
    """Rows (tokens x group) of a small tile, at least `group`."""
    large_rows: int
    n_programs: int
    """Programs that fill the chip evenly."""

    @property
    def small_tokens(self) -> int:
        return self.small_rows // self.group

    @property
    def most_splits(self) -> int:
        """More tiles than spans that `cut` makes at most, when every span fits a small tile."""
        return -(-self.n_programs // self.n_kv_heads)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TileList:
    """The work of one step."""

    tiles: np.ndarray
    """int32 [n_tiles, TILE_FIELDS]: the small ones first, each kind by falling number of keys."""
    n_small: int
    merges: np.ndarray
    """int32 [n_merged_rows, MERGE_FIELDS]."""
    n_partial_rows: int
    """Rows of partial results a KV head."""


def cut(q_indptr: np.ndarray, kv_lens: np.ndarray, slots: np.ndarray, shape: Shape) -> TileList:
    """The tiles of one step. Arguments as in `op.plan`."""
    lengths = np.diff(q_indptr)
    tile_tokens = np.where(lengths <= shape.small_tokens, shape.small_tokens, shape.large_rows // shape.group)
    span, index = _repeat(-(-lengths // tile_tokens))
    first = index * tile_tokens[span]
    n_tokens = np.minimum(lengths[span] - first, tile_tokens[span])
    position = kv_lens[span] - lengths[span] + first
    end = position + n_tokens
    large = lengths[span] > shape.small_tokens
    chunk = np.where(large, _large_chunk(end[large], shape), _small_chunk(end[~large], shape))

    tile, split = _repeat(-(-end // chunk))
    begin = split * chunk[tile]
    n_splits = np.bincount(tile, minlength=len(end))
    rows = np.where(n_splits[tile] > 1, n_tokens[tile] * shape.group, 0)
    partial = np.cumsum(rows) - rows
    columns = [
        q_indptr[:-1][span[tile]] + first[tile],
        n_tokens[tile],
        slots[span[tile]],
        position[tile],
        begin,
        np.minimum(begin + chunk[tile], end[tile]),
        np.where(rows > 0, partial, -1),
        np.zeros_like(begin),
    ]
    order = np.lexsort((begin - columns[5], large[tile]))
    merges = _merges(partial[split == 0], n_splits, q_indptr[:-1][span] + first, n_tokens, shape.group)
    table = np.stack(columns, axis=1)[order].astype(np.int32)
    return TileList(table, int((~large[tile]).sum()), merges, int(rows.sum()))


def _repeat(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (2, 0, 3): owners (0, 0, 2, 2, 2) and indices (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _small_chunk(ends: np.ndarray, shape: Shape) -> int:
    """Keys of a split such that the chip gets its programs (FlashInfer, Ye et al. 2025, algorithm 1: L_kv)."""
    even = -(-int(ends.sum()) * shape.n_kv_heads // shape.n_programs)
    return max(SHORTEST_SPLIT, -(-even // KEY_STEP) * KEY_STEP)


def _large_chunk(ends: np.ndarray, shape: Shape) -> int:
    """Large tiles are bound by arithmetic: split only when they leave part of the chip idle."""
    return NO_SPLIT if 2 * len(ends) * shape.n_kv_heads >= shape.n_programs else _small_chunk(ends, shape)


def _merges(
    partial: np.ndarray, n_splits: np.ndarray, q_row: np.ndarray, n_tokens: np.ndarray, group: int
) -> np.ndarray:
    """One line for each packed row of each split tile. All arguments are one entry a tile before splitting."""
    rows = np.where(n_splits > 1, n_tokens * group, 0)
    tile, row = _repeat(rows)
    columns = [partial[tile] + row, rows[tile], n_splits[tile], q_row[tile] * group + row]
    return np.stack(columns, axis=1).astype(np.int32)
