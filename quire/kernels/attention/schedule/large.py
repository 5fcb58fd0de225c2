"""Large lines: prefill and big shared prefixes, bound by arithmetic; a device-side queue hands them out.

Owns how their keys are split: only when they leave the chip idle, as split results have to be merged. Costs are counted
in blocks of 128 keys x 128 rows.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.attention.schedule.pieces import Cuts, repeat

KEYS = 128
"""Cuts lie at multiples of this from a tile's first key."""
TILE_COST = 1
"""Prologue and epilogue of a line."""
PARTIAL_COST = 1
"""Writing the partial result of a line, and reading it again."""
MERGE_COST = 2
"""The launch that merges partial results."""
SHORTEST = 2
"""Blocks of a piece."""
IMBALANCE = 1.25
"""Up to this times the even share, the longest CTA is not worth a split."""
PIECES_TRIED = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""Pieces of the longest tile."""
INVARIANT_KEYS = 8192
"""Keys of a piece in the batch-invariant mode: more than for small lines, as a chunk has many tiles of its own."""


def cuts(n_keys: np.ndarray, n_kv_heads: int, n_ctas: int, max_lines: int) -> Cuts:
    """Cuts of tiles of n_keys keys, each for n_kv_heads heads; at most max_lines pieces, or none."""
    blocks = -(-n_keys // KEYS)
    pieces = _pieces(blocks, n_kv_heads, n_ctas, max_lines)
    if pieces is None:
        return Cuts(np.zeros(0, np.int64), np.zeros(0, np.int64))
    tile, index = repeat(pieces - 1)
    return Cuts(tile, (index + 1) * blocks[tile] // pieces[tile] * KEYS)


def _pieces(blocks: np.ndarray, n_kv_heads: int, n_ctas: int, max_lines: int) -> np.ndarray | None:
    """Pieces of each tile, None: no split. The makespan of list scheduling is estimated for several lengths."""
    if not len(blocks):
        return None
    even = (int(blocks.sum()) + TILE_COST * len(blocks)) * n_kv_heads / n_ctas
    ones = np.ones_like(blocks)
    best, chosen = _makespan(blocks + TILE_COST, ones, n_kv_heads, n_ctas), None
    if best <= max(IMBALANCE * even, even + MERGE_COST):
        return None
    longest = int(blocks.max())
    for count in PIECES_TRIED:
        length = -(-longest // count)
        if length < SHORTEST:
            break
        pieces = np.maximum(-(-blocks // length), 1)
        if pieces.sum() > max_lines:
            break
        split = pieces > 1
        merge = MERGE_COST + PARTIAL_COST * int(pieces[split].sum()) * n_kv_heads / n_ctas
        if even + merge >= best:
            break
        cost = -(-blocks // pieces) + TILE_COST + PARTIAL_COST * split
        makespan = _makespan(cost, pieces, n_kv_heads, n_ctas) + merge
        if makespan < best:
            best, chosen = makespan, pieces
    return chosen


def _makespan(cost: np.ndarray, pieces: np.ndarray, n_kv_heads: int, n_ctas: int) -> float:
    """Lower bound of the longest CTA's cost: the mean, or k + 1 of the k * n_ctas + 1 dearest lines meet."""
    by_cost = np.argsort(-cost)
    count = np.cumsum(pieces[by_cost]) * n_kv_heads
    bound = int((cost * pieces).sum()) * n_kv_heads / n_ctas
    for k in range(4):
        if k * n_ctas >= count[-1]:
            break
        bound = max(bound, (k + 1) * int(cost[by_cost[count.searchsorted(k * n_ctas, side="right")]]))
    return bound
