"""Small lines: their keys are cut so that every CTA gets the same cost.

All tiles of a step are laid end to end and cut into equal shares (stream-K, Osama et al. 2023); steps with fewer tiles
than CTAs get one piece a CTA instead where that is as good. Costs are counted in keys read.
"""

from __future__ import annotations

import heapq

import numpy as np

from quire.kernels.attention.schedule.pieces import Cuts

KEYS = 64
"""Cuts lie at multiples of this from a tile's first key."""
TILE_COST = 256
"""Prologue and epilogue of a tile: measured on an H200, where 128 to 512 do equally well."""
SHORTEST = 128
"""Keys; a shorter piece costs more in its prologue and in merging than it gains."""
SHORTEST_SHARE = 256
"""Cost; keeps two cuts in one tile at least `SHORTEST` keys apart."""
MERGE_COST = 160
"""The launch that merges partial results, for each CTA."""
INVARIANT_KEYS = 2048
"""Keys of a piece in the batch-invariant mode."""


def cuts(n_keys: np.ndarray, n_kv_heads: int, n_ctas: int) -> Cuts:
    """Cuts of tiles of n_keys keys, each for n_kv_heads heads."""
    keys = (n_keys + (KEYS - 1)) // KEYS * KEYS
    cost = keys + TILE_COST
    ends = np.cumsum(cost) * n_kv_heads
    total = int(ends[-1]) if len(ends) else 0
    n_shares = max(1, min(n_ctas, total // SHORTEST_SHARE))
    if 0 < len(keys) * n_kv_heads <= n_ctas:
        pieces = _even_pieces(keys // KEYS, n_ctas // n_kv_heads)
        longest = TILE_COST + int((-(-keys // pieces)).max())
        merged = MERGE_COST if pieces.max() == 1 else 0
        if longest <= total // n_shares + TILE_COST + KEYS + merged:
            return _piece_cuts(keys // KEYS, pieces, n_kv_heads)
    return _share_cuts(cost, ends, n_kv_heads, n_shares)


def fixed_cuts(n_keys: np.ndarray, n_kv_heads: int, length: int) -> Cuts:
    """Cuts after every `length` visible keys, whatever the other tiles are."""
    per_tile = np.repeat(np.maximum((n_keys - 1) // length, 0), n_kv_heads)
    tile = np.repeat(np.arange(len(per_tile)), per_tile)
    index = np.arange(len(tile)) - np.repeat(np.cumsum(per_tile) - per_tile, per_tile)
    return Cuts(tile, (index + 1) * length)


def queue(cuts: Cuts, n_lines: int, n_ctas: int) -> np.ndarray:
    """int32 [n_ctas + 1] of lines that stand in the order of CTAs."""
    bounds = np.full(n_ctas + 1, n_lines, np.int32)
    if cuts.starts is None:
        raise ValueError("these cuts are not the shares of CTAs: assign() puts such lines in order")
    bounds[: len(cuts.starts)] = cuts.starts
    return bounds


def assign(n_keys: np.ndarray, n_ctas: int) -> tuple[np.ndarray, np.ndarray]:
    """Lines of n_keys visible keys in the order of CTAs, and the queue: the longest to the least loaded."""
    cost = n_keys + TILE_COST
    loads = [(0, cta) for cta in range(n_ctas)]
    dearest, owners = np.argsort(-cost, kind="stable"), []
    for added in cost[dearest].tolist():
        load, cta = loads[0]
        owners.append(cta)
        heapq.heapreplace(loads, (load + added, cta))
    owner = np.empty(len(cost), np.int64)
    owner[dearest] = owners
    bounds = np.zeros(n_ctas + 1, np.int32)
    bounds[1:] = np.cumsum(np.bincount(owner, minlength=n_ctas))
    return np.argsort(owner, kind="stable"), bounds


def _even_pieces(blocks: np.ndarray, room: int) -> np.ndarray:
    """Pieces of each tile, at most `room` in all, such that the longest is shortest. blocks: tiles in `KEYS` keys."""
    low = max(SHORTEST // KEYS, -(-int(blocks.sum()) // room))
    high = max(low, int(blocks.max()))
    while low < high:
        middle = (low + high) // 2
        if np.maximum(-(-blocks // middle), 1).sum() <= room:
            high = middle
        else:
            low = middle + 1
    pieces: np.ndarray = np.maximum(np.minimum(-(-blocks // low), blocks * KEYS // SHORTEST), 1)
    return pieces


def _piece_cuts(blocks: np.ndarray, pieces: np.ndarray, n_kv_heads: int) -> Cuts:
    """Each tile into its number of about equal pieces, and each line a CTA's whole share."""
    blocks, pieces = np.repeat(blocks, n_kv_heads), np.repeat(pieces, n_kv_heads)
    tile = np.repeat(np.arange(len(pieces)), pieces - 1)
    index = np.arange(1, len(tile) + 1) - np.repeat(np.cumsum(pieces - 1) - (pieces - 1), pieces - 1)
    return Cuts(tile, index * blocks[tile] // pieces[tile] * KEYS, np.arange(pieces.sum()))


def _share_cuts(cost: np.ndarray, ends: np.ndarray, n_kv_heads: int, n_shares: int) -> Cuts:
    """All tiles end to end, cut into equal shares; a cut close to a tile's edge moves there.

    cost: of each tile; ends: cumulated, with all heads.
    """
    at = np.arange(1, n_shares) * (ends[-1] if len(ends) else 0) // n_shares
    index = ends.searchsorted(at, side="right")
    one = cost[index]
    head, rest = np.divmod(at - (ends[index] - one * n_kv_heads), one)
    keys = one - TILE_COST
    offset = (rest - (TILE_COST - KEYS // 2)) // KEYS * KEYS
    edge = (keys < 2 * SHORTEST) | (offset < KEYS) | (offset > keys - KEYS)
    late = edge & (2 * offset >= keys)
    tile = index * n_kv_heads + head + late
    inside = ~edge
    starts = np.zeros(n_shares, np.int64)
    starts[1:] = tile + np.cumsum(inside)
    offset = np.minimum(np.maximum(offset, SHORTEST), keys - SHORTEST)
    return Cuts(tile[inside], offset[inside], starts)
