"""The list of work, tiles, the fields of a line, and the splitting of tiles over keys at given cuts.

Owns no decision where to cut (stream.py, large.py). Invariant: the pieces of a tile stand side by side in the order of
keys.
"""

from __future__ import annotations

import dataclasses

import numpy as np

FIELDS = 12
ROW, N_TOKENS, POSITION, BEGIN, END, KV_AT, BLOCKS_AT, PARTIAL, KV_HEAD, GATHERED = range(10)
"""Fields of a line: QuireTile in csrc/cuda/attention.h."""

LARGE_ROWS = 128
"""Packed rows (tokens x query heads of a KV head) of a large line."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Tiles of one kind before their keys are split; small ones stand for all KV heads."""

    lines: np.ndarray
    """int32 [n, 12]."""
    n_keys: np.ndarray
    """int32 [n]: keys that some row may see: end - begin, less the gap."""
    n_first: int | None
    """Visible keys before the gap between leading positions and the window; None: there is no gap."""
    gap: np.ndarray | None
    """int32 [n]: invisible keys behind the first n_first."""
    joined: np.ndarray | None
    """bool [n]: results are partial even if the keys are not split (shared prefixes)."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Where tiles are split; in order."""

    tile: np.ndarray
    """int [n]: tile (small: index in `Tiles` * n_kv_heads + KV head)."""
    offset: np.ndarray
    """int [n]: visible keys of the tile before the cut, > 0."""
    starts: np.ndarray | None = None
    """int [n_shares]: first line of each share of the small lines."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Lines of one kind, and which of them write partial results."""

    lines: np.ndarray
    """int32 [n, 12]."""
    partial: np.ndarray
    """int [n_partial]: indices of lines with partial results."""
    leads: np.ndarray
    """bool [n_partial]: the line is the first piece of its tile."""
    n_heads: int
    """KV heads that each line is computed for."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """The work of one step, int32 (fields: csrc/cuda/attention.h)."""

    small: np.ndarray
    """[n, 12], in the order of the CTAs."""
    large: np.ndarray
    """[n, 12], the sequence with the dearest line first, its lines by falling cost."""
    queue: np.ndarray
    """[n_ctas + 1]: CTA c runs small lines queue[c] .. queue[c + 1] - 1."""
    rows: np.ndarray
    """[n, 2]: row of q and position of each token of the gathered lines."""
    merges: np.ndarray
    """[n, 4]."""
    parts: np.ndarray
    """[n]: for each merge its partial results in the order of keys."""
    blocks: np.ndarray
    """[n]: SPARSE: the plan's lists of pages."""
    n_partial_rows: int


def repeat(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (2, 0, 3): owners (0, 0, 2, 2, 2) and indices (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def split(tiles: Tiles, cuts: Cuts, copies: int, n_heads: int) -> Pieces:
    """The pieces of tiles. Each tile becomes one for each of `copies` KV heads, computed for n_heads heads."""
    lines = np.repeat(tiles.lines, copies, axis=0)
    lines.reshape(-1, copies, FIELDS)[:, :, KV_HEAD] = np.arange(copies, dtype=np.int32)
    if not len(lines):
        return Pieces(lines, np.zeros(0, np.int64), np.zeros(0, bool), n_heads)
    counts = np.bincount(cuts.tile, minlength=len(lines)) + 1
    at = cuts.tile + np.arange(1, len(cuts.tile) + 1)
    if len(at):
        lines = np.repeat(lines, counts, axis=0)
        before = lines[at, BEGIN] + cuts.offset
        after = before
        if tiles.gap is not None:
            gap = tiles.gap[cuts.tile // copies]
            before, after = before + gap * (cuts.offset > tiles.n_first), after + gap * (cuts.offset >= tiles.n_first)
        lines[at, BEGIN] = after
        lines[at - 1, END] = before
    partial = np.zeros(len(lines), bool)
    partial[at - 1] = True
    partial[at] = True
    if tiles.joined is not None:
        partial |= np.repeat(np.repeat(tiles.joined, copies), counts)
    leads = np.ones(len(lines), bool)
    leads[at] = False
    chosen = partial.nonzero()[0]
    return Pieces(lines, chosen, leads[chosen], n_heads)
