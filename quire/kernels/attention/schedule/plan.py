"""The values of a plan: which rows attend to which keys, where the keys lie, and what a device derived from that.

Owns no arithmetic and no cutting (tiles.py). Invariant: one plan serves every layer of a step.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

MOST_PLACED_HEADS = 64
"""Query heads of one KV head, of which a small line holds those of a token."""


@enum.unique
class Layout(enum.IntEnum):
    """Where the keys of a span are found (QUIRE_LAYOUT in csrc)."""

    PAGED = 0
    """In pages [n_pages, n_kv_heads, page_size, head_dim], through a page table."""
    RAGGED = 1
    """In consecutive rows of [n_keys, n_kv_heads, head_dim]."""
    SPARSE = 2
    """In pages, and only those that a list of the span names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one layer's attention."""

    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int = 0
    """v > 0: values have v dimensions; 0: as many as keys."""

    @property
    def out_dim(self) -> int:
        """Dimensions of a value, and of a result."""
        return self.value_dim or self.head_dim

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.n_q_heads // self.n_kv_heads


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Spans whose first `n_keys` keys lie in the same pages. n_keys is a multiple of the page size."""

    spans: Sequence[int]
    n_keys: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Spans whose rows are a tree of tokens (Miao et al. 2024, section 4): a root, and nodes behind it, parents before
    their children. Keys lie in the order of the rows. A row stands as many positions behind the root as it has nodes,
    its own among them, and sees the keys up to the root's and those of its nodes, which follow one another for it."""

    paths: np.ndarray
    """uint64 [n_rows]: bit i: node i is the row's own, or above it. 0: a root."""
    firsts: np.ndarray
    """int32 [n_spans]: where the key of node 0 lies, behind the root's; kv_lens: the span is no tree."""

    def is_tree(self, kv_lens: np.ndarray) -> np.ndarray:
        """bool [n_spans]."""
        found: np.ndarray = self.firsts < kv_lens
        return found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttnSpans:
    """The rows and keys of a step, on the host. A span may have no rows; SPARSE spans may share a slot."""

    q_indptr: np.ndarray
    """int32 [n_spans + 1]: rows of q of span s are q_indptr[s] .. q_indptr[s + 1] - 1."""
    kv_lens: np.ndarray
    """int32 [n_spans]: keys of the sequence up to and with the span's last row: row i of span s stands at position
    kv_lens[s] - (q_indptr[s + 1] - i)."""
    kv_at: np.ndarray
    """int32 [n_spans]: PAGED, SPARSE: row of the page table (slot); RAGGED: row of k and v of the span's key 0."""
    block_indptr: np.ndarray | None = None
    """SPARSE: int32 [n_spans + 1], the span's part of `blocks`."""
    blocks: np.ndarray | None = None
    """SPARSE: int32, ascending in each span: logical pages (position // page_size) that the span may read."""
    trees: Trees | None = None
    """PAGED, causal: some spans are trees."""

    @property
    def lengths(self) -> np.ndarray:
        """int32 [n_spans]: rows of each span."""
        return np.diff(self.q_indptr)

    @property
    def listed(self) -> tuple[np.ndarray, np.ndarray]:
        """(block_indptr, blocks) of a SPARSE plan. Raises ValueError for spans without lists."""
        if self.block_indptr is None or self.blocks is None:
            raise ValueError("these spans name no blocks: only a SPARSE plan has block_indptr and blocks")
        return self.block_indptr, self.blocks


class Mirrored(Protocol):
    """Memory of the device with a side on the host, which somebody sends there."""

    device: torch.Tensor
    """int32 [n], contiguous."""

    @property
    def host(self) -> np.ndarray:
        """int32 [n]: what the next copy takes along."""

    def filled(self, n: int) -> None:
        """The first n integers of the host's side were written."""


class PlanBuffers(Protocol):
    """Device memory with fixed addresses that holds one step's work after another (for CUDA graphs)."""

    n_ints: int
    """Integers that they take at the start of their memory."""

    def fill(self, plan: AttnPlan) -> Any:
        """Overwrite with this plan's work, in stream order; raises ValueError when it does not fit."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttnPlan:
    """One step's spans, and what a device derived from them."""

    layout: Layout
    heads: Heads
    page_size: int
    """Tokens of a page; 1 for RAGGED."""
    spans: AttnSpans
    page_table: torch.Tensor | None
    """int32 [n_slots, max_pages], on the device; read when `run` executes. None for RAGGED."""
    causal: bool = True
    window: int = 0
    """Keys below a row's window (w > 0) are not planned, apart from the first `n_first`."""
    n_first: int = 0
    shared: Sequence[SharedPrefix] = ()
    batch_invariant: bool = False
    """Tiles and their cuts depend on a span alone, so that its results do not depend on its neighbours."""
    few: np.ndarray | None = None
    """bool [n_spans]: spans that get small lines, the others large ones; None: by their number of rows."""
    settled: bool = False
    """Keys below a span's first row may be read while the kernel launched just before `run` still runs."""
    work: Any = None
    """The device's own work list (schedule/work.py, cpu/work.py)."""

    def on(self, page_table: torch.Tensor) -> AttnPlan:
        """The same work over other pages. page_table: of the same shape, on the same device; runs of both plans share
        memory for partial results. Raises ValueError for a table of another shape or on another device."""
        table = self.paged_table
        if page_table.shape != table.shape or page_table.device != table.device or not page_table.is_contiguous():
            raise ValueError(
                f"a plan over a page table {tuple(table.shape)} on {table.device} cannot take one of "
                f"{tuple(page_table.shape)} on {page_table.device}"
            )
        return dataclasses.replace(self, page_table=page_table, work=self.work.on(page_table))

    def place(self, positions: torch.Tensor) -> None:
        """On a GPU, in stream order: rows stand there from now on, at their planned positions or before them, those of
        a span one behind the other. positions: int64 [at least one for each row], on the device. Spans have small lines
        (few rows, of at most 64 query heads a KV head) and share nothing. Raises ValueError for a plan with a window,
        which is cut by where rows stand, or with more heads."""
        if self.heads.group > MOST_PLACED_HEADS:
            raise ValueError(f"rows of {self.heads.group} query heads a KV head are large lines, which are not placed")
        if self.window or self.n_first or not self.causal or self.shared or self.batch_invariant:
            raise ValueError("rows can be placed in plans that are causal, share nothing, and have no window")
        self.work.place(positions)

    @property
    def n_rows(self) -> int:
        """Rows of q that are real."""
        return int(self.spans.q_indptr[-1])

    @property
    def paged_table(self) -> torch.Tensor:
        """The page table. Raises ValueError for a RAGGED plan, which has none."""
        if self.page_table is None:
            raise ValueError("a RAGGED plan has no page table")
        return self.page_table
