"""Ranks that take the tokens of sequences in turn, each with pages of its own tokens: attention plans of their steps.

Liu et al. 2023, "Ring attention". Owns which rows meet which keys, and what goes round: keys and values, or queries
whose partial states go home, whichever is fewer bytes (Yang et al. 2024, arXiv 2411.01783, section 3.4). Does not own
which rows a rank has (`forward/ring`), whose turn is which (`ring_spans`), nor what is sent when (`ring_context`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quire.compute.dist.comm import MeetingComm
from quire.compute.models.decoder import Decoder
from quire.compute.runner.pool import KVPool
from quire.compute.runner.ring_spans import Block, SeenSpans, joined, seen, window_of
from quire.compute.runner.tables import SlotTables
from quire.kernels.attention import op as attention
from quire.kernels.attention.schedule.plan import AttnPlan
from quire.kernels.attention.variant import Variant
from quire.planner.context import ring_keys_bytes, ring_queries_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class RingPlan:
    """Rows against keys of one rank, of layers with one window."""

    rows: slice
    """Of the queries at hand."""
    of_group: Mapping[int, AttnPlan]
    """By group of layers; empty: no row sees a key."""
    window: int
    """Among the keys of this rank; 0: there is none."""
    blind: torch.Tensor | None
    """int64: those of `rows` that see no key."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sharing:
    """How layers with one window attend in a step."""

    plans: Sequence[Sequence[RingPlan]]
    """By rank: whose queries have come, or whose keys. Of a step that is not divided: of this rank's keys alone."""
    pages: Mapping[int, torch.Tensor] | None = None
    """int64, by group: those that go round; None: queries do."""


class Ring:
    """One rank's place."""

    def __init__(self, model: Decoder, comm: MeetingComm) -> None:
        self.comm, self.rank, self.n_ranks = comm, comm.rank, comm.size
        self._itemsize = model.dtype.itemsize
        variants = [layer.mixer.variant for layer in model.layers]
        self._windows = {layer: one.window for layer, one in enumerate(variants) if one is not None}
        self._within: dict[tuple[int, int], Variant] = {}

    def within(self, layer: int, variant: Variant, window: int) -> Variant:
        """The variant of a layer, with a window among the keys of one rank."""
        if window == variant.window:
            return variant
        if (layer, window) not in self._within:
            self._within[layer, window] = dataclasses.replace(variant, window=window)
        return self._within[layer, window]

    def whole(self, pool: KVPool, tables: SlotTables, blocks: Sequence[Block]) -> dict[int, Sharing]:
        """A step of which every rank has all rows, those of each block behind one another: by window of layers."""
        found = {}
        for window, groups in self._kinds(pool).items():
            of_groups = {group: tables.pages[group] for group in groups}
            plans, first = [], 0
            parts = [(block, seen(block, self.rank, block.slots)) for block in blocks if len(block.rows)]
            if not window:  # all of them have the same mask
                parts = [(parts[0][0], joined([part for _, part in parts]))] if parts else []
            for block, part in parts:
                plans.append(self._planned(pool, of_groups, block.rank, self.rank, window, part, first))
                first += int(part.q_indptr[-1])
            found[window] = Sharing([plans])
        return found

    def divided(
        self, pool: KVPool, tables: SlotTables, blocks: Sequence[Block], most_rows: int
    ) -> dict[int, Sharing]:
        """A step of which each rank has its own block, filled up to `most_rows`: by window of layers."""
        found = {}
        for window, groups in self._kinds(pool).items():
            first, end = _page_range(tables.page_size, blocks, window)
            if self.queries_bytes(pool, most_rows) <= self.keys_bytes(pool, int((end - first).sum())):
                of_groups = {group: tables.pages[group] for group in groups}
                plans = [
                    [self._of_block(pool, of_groups, block, self.rank, window, block.slots)] for block in blocks
                ]  # fmt: skip
                found[window] = Sharing(plans)
            else:
                found[window] = self._with_keys(pool, tables, blocks[self.rank], window, groups, (first, end))
        return found

    def _with_keys(
        self,
        pool: KVPool,
        tables: SlotTables,
        own: Block,
        window: int,
        groups: Sequence[int],
        pages: tuple[np.ndarray, np.ndarray],
    ) -> Sharing:
        """pages: int64 twice, first and behind the last one of each span. They are taken out of the pool, span by span,
        and have a page table of their own."""
        first, end = pages
        counts = end - first
        spans = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(len(spans)) - np.repeat(np.cumsum(counts) - counts, counts) + first[spans]
        table = np.zeros((len(counts), int(end.max(initial=1))), np.int32)
        table[spans, columns] = np.arange(len(spans))
        of_groups = dict.fromkeys(groups, tables.upload(table))
        numbers = np.arange(len(counts), dtype=np.int32)
        plans = [[self._of_block(pool, of_groups, own, rank, window, numbers)] for rank in range(self.n_ranks)]
        ids = {group: tables.host_pages[group, own.slots[spans], columns].astype(np.int64) for group in groups}
        return Sharing(plans, {group: tables.upload(found) for group, found in ids.items()})

    def _kinds(self, pool: KVPool) -> dict[int, list[int]]:
        """Window of layers → their groups."""
        found: dict[int, set[int]] = {}
        for layer, group in pool.group_of.items():
            found.setdefault(self._windows[layer], set()).add(group)
        return {window: sorted(groups) for window, groups in found.items()}

    def keys_bytes(self, pool: KVPool, n_pages: int) -> float:
        """That a rank sends in a layer where so many pages go round."""
        page_size = pool.k.shape[3]
        return ring_keys_bytes(n_pages * page_size, pool.bytes_per_token / pool.layout.n_lanes, self.n_ranks)

    def queries_bytes(self, pool: KVPool, n_rows: int) -> float:
        """That it sends where so many rows of queries do."""
        value_dim = pool.value_dim or pool.head_dim
        return ring_queries_bytes(n_rows, pool.n_heads, pool.head_dim, value_dim, self._itemsize, self.n_ranks)

    def _of_block(
        self,
        pool: KVPool,
        tables: Mapping[int, torch.Tensor],
        block: Block,
        key_rank: int,
        window: int,
        slots: np.ndarray,
    ) -> RingPlan:
        """slots: rows of the page tables of the block's spans."""
        return self._planned(pool, tables, block.rank, key_rank, window, seen(block, key_rank, slots))

    def _planned(
        self,
        pool: KVPool,
        tables: Mapping[int, torch.Tensor],
        rank: int,
        key_rank: int,
        window: int,
        part: SeenSpans,
        first_row: int = 0,
    ) -> RingPlan:
        """tables: page table of each group."""
        rows = slice(first_row, first_row + int(part.q_indptr[-1]))
        own = window_of(window, rank, key_rank, self.n_ranks) if window else 0
        if rows.start == rows.stop or (window and not own):
            return RingPlan(rows, {}, 0, None)
        first = next(iter(tables.values()))
        plan = attention.plan(
            part.q_indptr, part.kv_lens, part.slots, first, page_size=pool.k.shape[3], n_q_heads=pool.n_heads,
            n_kv_heads=pool.k.shape[2], head_dim=pool.head_dim, value_dim=pool.value_dim,
            variant=Variant(1.0, window=own),
        )  # fmt: skip
        blind = torch.from_numpy(part.blind).to(first.device) if len(part.blind) else None
        of_group = {group: plan if table is first else plan.on(table) for group, table in tables.items()}
        return RingPlan(rows, of_group, own, blind)


def _page_range(page_tokens: int, blocks: Sequence[Block], window: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 twice: of each span the first page that its rows see, and the one behind the last."""
    ends = np.sum([block.ends for block in blocks], axis=0)
    starts = ends - np.sum([block.counts for block in blocks], axis=0)
    behind = np.maximum(0, starts - window + 1) if window else np.zeros_like(starts)
    return behind // page_tokens, -(-ends // page_tokens)
