"""Whose turn a token is where ranks take the tokens of a sequence in turn, and which keys of a rank it sees.

Owns the arithmetic. Does not own attention plans, nor what is sent (`ring`).
Of n ranks, rank j has the tokens at positions j, j + n, j + 2 n, ...: position p is its token number p // n. So rows of
one rank follow each other, as do keys, and one sees the other as in any sequence, or but for the newest key:

    row a of rank i (position n a + i) sees key c of rank j (position n c + j)  if  c <= a, j <= i  or  c < a, j > i

Work is even whatever the lengths: the reason for the zig-zag order of other rings (Brandon et al. 2023, "Striped
attention", section 3).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.compute.runner.batch_builder import FlatBatch


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """The rows of a step that are one rank's turn."""

    rank: int
    rows: np.ndarray
    """int64 [n]: of the flat batch, in its order."""
    ends: np.ndarray
    """int64 [n_spans]: tokens of this rank that each span's sequence has up to the span's end."""
    counts: np.ndarray
    """int64 [n_spans]: rows of each span that are its turn."""
    slots: np.ndarray
    """int32 [n_spans]."""


@dataclasses.dataclass(frozen=True, slots=True)
class SeenSpans:
    """A block against the keys of one rank, as arguments of `kernels.attention.op.plan`."""

    q_indptr: np.ndarray
    kv_lens: np.ndarray
    slots: np.ndarray
    """int32."""
    blind: np.ndarray
    """int64: rows that see no key; they are planned as if they saw one."""


def blocks_of(batch: FlatBatch, n_ranks: int) -> list[Block]:
    """Of each rank. No span is a tree."""
    ends, turns = batch.kv_lens.astype(np.int64), batch.row_positions % n_ranks
    starts = ends - np.diff(batch.q_indptr)
    found = []
    for rank in range(n_ranks):
        own_ends = tokens_of(ends, rank, n_ranks)
        counts = own_ends - tokens_of(starts, rank, n_ranks)
        found.append(Block(rank, np.flatnonzero(turns == rank), own_ends, counts, batch.span_slots))
    return found


def tokens_of(n_tokens: np.ndarray, rank: int, n_ranks: int) -> np.ndarray:
    """int64: how many of a sequence's first tokens are a rank's."""
    found: np.ndarray = (n_tokens - rank + n_ranks - 1) // n_ranks
    return found


def seen(block: Block, key_rank: int, slots: np.ndarray) -> SeenSpans:
    """Spans of the block against that rank's keys, which lie at `slots` of a page table, int32 [n_spans]. A row of a
    sequence's first turn may see none: it becomes a span of its own."""
    lacks = int(key_rank > block.rank)
    is_blind = (block.counts > 0) & (block.ends - block.counts < lacks)
    spans = np.repeat(np.arange(len(block.ends)), 1 + is_blind)
    lengths, kv_lens = block.counts[spans], np.maximum(0, block.ends[spans] - lacks)
    split = np.flatnonzero(is_blind) + np.arange(np.count_nonzero(is_blind))  # places of single rows among the spans
    lengths[split], kv_lens[split] = 1, 1
    lengths[split + 1] -= 1
    q_indptr = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(lengths, out=q_indptr[1:])
    return SeenSpans(q_indptr, kv_lens.astype(np.int32), slots[spans], q_indptr[split].astype(np.int64))


def joined(parts: list[SeenSpans]) -> SeenSpans:
    """Blocks whose rows lie behind one another."""
    firsts = np.cumsum([0, *(part.q_indptr[-1] for part in parts[:-1])])
    indptr = [np.zeros(1, np.int64), *(part.q_indptr[1:] + at for part, at in zip(parts, firsts, strict=True))]
    return SeenSpans(
        np.concatenate(indptr).astype(np.int32),
        np.concatenate([part.kv_lens for part in parts]),
        np.concatenate([part.slots for part in parts]),
        np.concatenate([part.blind + at for part, at in zip(parts, firsts, strict=True)]),
    )


def window_of(window: int, rank: int, key_rank: int, n_ranks: int) -> int:
    """Keys of a rank that a row of another one sees of a window, counted from the newest that it would see without; 0:
    none."""
    return (window - 1 - rank + key_rank) // n_ranks + (key_rank <= rank)
