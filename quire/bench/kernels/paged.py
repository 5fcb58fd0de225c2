"""A batch for attention, and its inputs on a device: pages in random order, several pools, a plan.

Owns what a batch has to read and to compute. Invariant: no value is zero and no run finds its keys in the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import torch

from quire.bench.kernels.case import Setting
from quire.bench.kernels.limits import Work
from quire.kernels.attention import op
from quire.kernels.attention.schedule.plan import AttnPlan, Heads, SharedPrefix
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry

LLAMA = Heads(32, 8, 128)
E4M3_NAN = 0x7F


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Spans (kv_len, rows) of one step."""

    spans: tuple[tuple[int, int], ...]
    heads: Heads = LLAMA
    page_size: int = 16
    n_shared: int = 0
    """The first keys of all spans lie in the same pages."""
    tell_shared: bool = True
    """The plan is told of the shared keys, so that they can be read once."""
    ragged: bool = False
    """Keys in rows behind each other, not in pages."""
    coded: bool = False
    """Keys and values in e4m3."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([length for _, length in self.spans], np.int32)

    @property
    def kv_lens(self) -> np.ndarray:
        return np.array([kv_len for kv_len, _ in self.spans], np.int32)

    @property
    def n_rows(self) -> int:
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        return int(self.kv_lens.max())

    @property
    def uniform(self) -> bool:
        """All spans are alike, so that they are a dense batch for others."""
        return len(set(self.spans)) == 1 and self.spans[0][1] in (1, self.spans[0][0]) and not self.n_shared

    def q_indptr(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int32)

    def work(self, variant: Variant, element_bytes: int) -> Work:
        """Each visible key is read once, shared ones once in all; 4 flops an element and visible (row, key)."""
        head_dim, n_q_heads, n_kv_heads = self.heads.head_dim, self.heads.n_q_heads, self.heads.n_kv_heads
        n_keys, n_pairs = self.n_shared, 0
        for kv_len, length in self.spans:
            ends = np.arange(kv_len - length, kv_len, dtype=np.int64) + 1
            if not variant.causal:
                ends = np.full(length, kv_len, np.int64)
            if variant.window:
                seen = np.minimum(ends, variant.window + np.minimum(variant.n_first, ends))
                n_keys += min(kv_len, variant.window + length - 1 + variant.n_first) - self.n_shared
            else:
                seen = ends
                n_keys += kv_len - self.n_shared
            n_pairs += int(seen.sum())
        rows_bytes = self.n_rows * n_q_heads * head_dim * element_bytes
        read_bytes = 2 * n_keys * n_kv_heads * head_dim * (1 if self.coded else element_bytes) + rows_bytes
        return Work(read_bytes, rows_bytes, 4.0 * n_pairs * n_q_heads * head_dim)

    def page_table(self) -> tuple[np.ndarray, int]:
        """int32 [n_spans, most pages] of pages in random order, and the number of pages; page 0 belongs to nobody."""
        counts = -(-self.kv_lens // self.page_size)
        n_shared = self.n_shared // self.page_size
        own = counts - n_shared
        n_pages = 1 + n_shared + int(own.sum())
        order = np.random.default_rng(0).permutation(np.arange(1, n_pages, dtype=np.int32))
        table = np.zeros((len(counts), int(counts.max())), np.int32)
        table[:, :n_shared] = order[:n_shared]
        for row, count, end in zip(table, own, n_shared + np.cumsum(own), strict=True):
            row[n_shared : n_shared + count] = order[end - count : end]
        return table, n_pages

    def plan(self, table: torch.Tensor, variant: Variant, batch_invariant: bool = False) -> AttnPlan:
        """The plan. table: on the device; for a ragged batch only its device counts."""
        sizes = dataclasses.asdict(self.heads) | {"variant": variant, "batch_invariant": batch_invariant}
        if self.ragged:
            bounds = np.concatenate(([0], np.cumsum(self.kv_lens)))
            return op.plan_ragged(self.q_indptr(), bounds, device=table.device, **sizes)
        slots = np.arange(len(self.spans), dtype=np.int32)
        shared = [SharedPrefix(range(len(slots)), self.n_shared)] if self.n_shared and self.tell_shared else ()
        return op.plan(
            self.q_indptr(), self.kv_lens, slots, table, page_size=self.page_size, shared=shared, **sizes
        )  # fmt: skip


class Inputs:
    """Queries, pools of keys and values, and a table on the device."""

    def __init__(self, batch: Batch, setting: Setting, n_copies: int = 0, poison: bool = False) -> None:
        """n_copies: pools; 0: as many as leave the cache. poison: NaN wherever no token is."""
        self.batch, self.setting = batch, setting
        heads, table, n_pages = batch.heads, *batch.page_table()
        self.table = torch.from_numpy(table).to(setting.device)
        self.q = setting.randn(batch.n_rows, heads.n_q_heads, heads.head_dim)
        shape: tuple[int, ...] = (n_pages, heads.n_kv_heads, batch.page_size, heads.head_dim)
        if batch.ragged:
            shape = (int(batch.kv_lens.sum()), heads.n_kv_heads, heads.head_dim)
        pool_bytes = 2.0 * np.prod(shape) * (1 if batch.coded else setting.element_bytes)
        n_copies = n_copies or setting.timer.n_copies(pool_bytes)
        dtype = E4M3 if batch.coded else setting.dtype
        self.pools = [(setting.randn(*shape).to(dtype), setting.randn(*shape).to(dtype)) for _ in range(n_copies)]
        if poison and not batch.ragged:
            self._poison()

    def plan(self, variant: Variant) -> AttnPlan:
        """See `Batch.plan`."""
        return self.batch.plan(self.table, variant)

    def _poison(self) -> None:
        size, nothing = self.batch.page_size, E4M3_NAN if self.batch.coded else float("nan")
        for k, v in self.pools:
            for x in map(entry.movable, (k, v)):
                x[0] = nothing
                for row, kv_len in zip(self.table, self.batch.kv_lens.tolist(), strict=True):
                    if kv_len % size:
                        x[row[kv_len // size], :, kv_len % size :] = nothing

    @functools.cached_property
    def dense(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each pool as [n_spans, n_kv_heads, kv_len, head_dim]; uniform batches only."""
        return [(self._dense(k), self._dense(v)) for k, v in self.pools]

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        n_spans, kv_len = len(self.batch.spans), self.batch.longest
        if self.batch.ragged:
            return x.view(n_spans, kv_len, *x.shape[1:]).transpose(1, 2).contiguous()
        return x[self.table.long()].transpose(1, 2).flatten(2, 3)[:, :, :kv_len].contiguous()

    def dense_q(self) -> torch.Tensor:
        """[n_spans, n_q_heads, rows, head_dim]."""
        return self.q.view(len(self.batch.spans), -1, *self.q.shape[1:]).transpose(1, 2).contiguous()


def lognormal(mean: float, deviation: float, seed: int, n: int = 64) -> Iterator[tuple[int, int]]:
    """Decode spans whose lengths have this mean and deviation of their logarithm."""
    for kv_len in np.random.default_rng(seed).lognormal(mean, deviation, n).astype(int):
        yield int(kv_len), 1
