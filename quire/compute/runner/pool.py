"""The KV pool on the device and the context through which a model's layers reach it.

Owns where a layer's keys lie: its group says which page table, its lane which part of a page (`config/kv`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.layers.context import Context
from quire.compute.runner.expanded_spans import ExpandedSpans
from quire.compute.runner.features import Features
from quire.compute.runner.spans_apart import apart
from quire.compute.runner.states import StatePool
from quire.compute.runner.tables import SlotTables
from quire.config.arch import ModelArch
from quire.config.kv import KVLayout, kv_layout
from quire.core.plan import PageCopy
from quire.kernels import mla
from quire.kernels.attention import op as attention
from quire.kernels.attention.schedule.plan import AttnPlan, PlanBuffers, SharedPrefix, Trees
from quire.kernels.attention.variant import Variant
from quire.kernels.invariance import are_rows_alone
from quire.kernels.kvstore import entry
from quire.kernels.kvstore import op as kvstore
from quire.kernels.qkv import rotate_and_store
from quire.kernels.state import StateSpans


class Across(Protocol):
    """Ranks that divide what attention reads, each with a pool of its own."""

    def around(self, inner: PagedContext) -> Context:
        """The context of a step of which each rank has all rows. inner: of this rank's pages."""
        ...


class KVPool:
    """`k` and `v`: [n_lanes, n_pages, n_kv_heads, page_size, entry] of the model's dtype, of e4m3, where a layer has
    scales, or of int8, where an entry has its own (`kernels.kvstore.entry`). Page 0 takes padding."""

    def __init__(
        self,
        arch: ModelArch,
        n_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: Device,
        layout: KVLayout | None = None,
    ) -> None:
        """arch: with all layers, of which a stage may have none that keeps keys. layout: None: one group, of which
        every layer keeps everything."""
        self.layout = kv_layout(arch, hybrid=False) if layout is None else layout
        spec = self.layout.groups[0].spec  # windows apart, that of every group
        shape = (self.layout.n_lanes, n_pages, spec.n_kv_heads, page_size, entry.entry_size(spec.head_dim, dtype))
        self.n_heads, self.head_dim, self.value_dim = arch.n_heads, spec.head_dim, spec.value_in_key
        self.k = device.zeros(shape, dtype)
        self.v = self.k[..., : spec.value_in_key] if spec.value_in_key else device.zeros(shape, dtype)
        self._stored = (self.k,) if spec.value_in_key else (self.k, self.v)
        self.scales: dict[int, entry.Scales] = {}
        """Of layers whose keys and values are e4m3 under other scales than 1; to be set before there is a forward."""
        self.features: Features | None = None
        """What a drafting head reads; to be set before there is a forward strategy."""
        self.states: StatePool | None = None
        """Of recurrent layers; likewise."""
        self.across: Across | None = None
        """How ranks that share tokens attend; likewise."""
        self.n_ranks = 1
        """That hold the tokens of a page in turn; likewise."""
        self.windows = list(dict.fromkeys(self.layout.windows))
        """Each kind of window once: what the work of attention differs by."""
        self.kind_of = [self.windows.index(window) for window in self.layout.windows]
        """Of each group, its place among them."""
        self.group_of = {layer: group for layer, (group, _) in self.layout.places.items()}
        """Of each layer that keeps keys."""
        self.pages_of = {layer: (self.k[lane], self.v[lane]) for layer, (_, lane) in self.layout.places.items()}
        """Of each: all pages of its keys, and of its values, [n_pages, n_kv_heads, page_size, entry]."""

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.n_heads // self.k.shape[2]

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all lanes of a page."""
        n_lanes, _, n_kv_heads, _, size = self.k.shape
        return len(self._stored) * n_lanes * n_kv_heads * size * self.k.element_size()

    def around(self, context: PagedContext) -> Context:
        """What layers are given: the pages of this rank, or of several."""
        return context if self.across is None else self.across.around(context)

    def copy(self, copies: list[PageCopy]) -> None:
        """Copy on write, in every lane."""
        if not copies:
            return
        sources, targets = ([getattr(one, name) for one in copies] for name in ("source", "target"))
        counts = [-(-one.n_tokens // self.n_ranks) for one in copies]
        for lane in range(self.k.shape[0]):
            kvstore.copy_pages(self._stored[0][lane], self._stored[-1][lane], sources, targets, counts)
        if self.features is not None:
            self.features.copy(copies)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Entries of single tokens, in every lane, and their features. Both int64 [n_groups, n], page * page_size +
        offset; all are read before one is written."""
        size = self.k.shape[3]
        for of_group, to in zip(sources, targets, strict=True):
            for pages in map(entry.movable, self._stored):
                pages[:, to // size, :, to % size] = pages[:, of_group // size, :, of_group % size]
        if self.features is not None:
            self.features.move(sources[0], targets[0])


@dataclasses.dataclass(slots=True)
class PagedContext:
    """What attention layers need in one step: where rows are written and what they see."""

    pool: KVPool
    plans: list[AttnPlan]
    """Of each group."""
    cache_locs: Sequence[torch.Tensor]
    """Of each group int64 [n_rows]: where each row's K and V are written, page * page_size + offset."""
    expanded: ExpandedSpans | None = None
    """See `Context`; `plans` are those of the other rows."""
    spans: StateSpans | None = None
    """Of recurrent layers."""

    def store(
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """See `Context`."""
        cache_locs = self.cache_locs[self.pool.group_of[layer]]
        return rotate_and_store(
            qkv, q_norm, k_norm, eps, positions, cos_sin, *self.pool.pages_of[layer], cache_locs,
            self.pool.scales.get(layer, entry.UNIT),
        )  # fmt: skip

    def store_lines(
        self,
        layer: int,
        lines: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        q: torch.Tensor,
        rotated: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> None:
        """See `Context`."""
        pages, cache_locs = self.pool.pages_of[layer][0], self.cache_locs[self.pool.group_of[layer]]
        mla.store(lines, norm, eps, q, rotated, positions, cos_sin, pages, cache_locs)

    def ask_lines(
        self,
        layer: int,
        lines: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        q: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """See `Context`."""
        pages, cache_locs = self.pool.pages_of[layer][0], self.cache_locs[self.pool.group_of[layer]]
        return mla.ask(lines, norm, eps, q, keys, positions, cos_sin, pages, cache_locs)

    def lines(self, layer: int, piece: slice) -> torch.Tensor:
        """See `Context`."""
        assert self.expanded is not None
        pages, locs = self.pool.pages_of[layer][0], self.expanded.locs[self.pool.group_of[layer]]
        return pages.view(-1, pages.shape[-1])[locs[piece]]

    def attend(self, layer: int, q: torch.Tensor, variant: Variant) -> torch.Tensor:
        """See `Context`."""
        plan, scales = self.plans[self.pool.group_of[layer]], self.pool.scales.get(layer, entry.UNIT)
        return attention.run(q, *self.pool.pages_of[layer], plan, variant, scales=scales)

    def attend_lines(self, layer: int, asked: torch.Tensor, variant: Variant, matrices: torch.Tensor) -> torch.Tensor:
        """See `Context`."""
        plan, scales = self.plans[self.pool.group_of[layer]], self.pool.scales.get(layer, entry.UNIT)
        return mla.attend(asked, *self.pool.pages_of[layer], plan, variant, matrices, scales)

    def states(self, layer: int) -> tuple[tuple[torch.Tensor, ...], StateSpans]:
        """See `Context`."""
        assert self.pool.states is not None and self.spans is not None
        return self.pool.states.of[layer], self.spans


def plan_attention(
    pool: KVPool,
    tables: SlotTables,
    kv_lens: np.ndarray,
    slots: np.ndarray,
    q_indptr: np.ndarray | None = None,
    buffers: Sequence[PlanBuffers] = (),
    shared: Sequence[SharedPrefix] = (),
    settled: bool = False,
    trees: Trees | None = None,
) -> list[AttnPlan]:
    """The attention plans of a step on this pool (`kernels.attention.op.plan`), one for each group, none where no layer
    has attention; groups with one
    window share their work, and differ in their page tables. Where rows are to be alone, they are planned so.

    q_indptr None: one row a span. buffers: for each of `KVPool.windows`, or none. shared: prefixes, which only layers
    that keep everything read together. settled: see there. trees: spans that are some; no step with them is
    alone.
    """
    if not pool.layout.n_lanes:
        return []
    if q_indptr is None:
        q_indptr = np.arange(len(kv_lens) + 1, dtype=np.int32)
    few, alone = None, are_rows_alone()
    if alone:
        spans = apart(q_indptr, kv_lens, slots, tables.prompt_lens[slots])
        q_indptr, kv_lens, slots, few, shared = spans.q_indptr, spans.kv_lens, spans.slots, spans.few, ()
    plans = [
        attention.plan(
            q_indptr,
            kv_lens,
            slots,
            tables.pages[0],
            page_size=pool.k.shape[3],
            n_q_heads=pool.n_heads,
            n_kv_heads=pool.k.shape[2],
            head_dim=pool.head_dim,
            value_dim=pool.value_dim,
            variant=Variant(1.0, window=window),
            buffers=buffers[kind] if buffers else None,
            shared=() if window else shared,
            batch_invariant=alone,
            settled=settled,
            few=few,
            trees=trees,
        )
        for kind, window in enumerate(pool.windows)
    ]
    return [plans[kind].on(tables.pages[group]) if group else plans[kind] for group, kind in enumerate(pool.kind_of)]
