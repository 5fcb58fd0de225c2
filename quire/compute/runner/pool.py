"""The KV pool on the device and the context through which a model's layers reach it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.runner.tables import SlotTables
from quire.config.arch import ModelArch
from quire.core.plan import PageCopy
from quire.kernels.attention import op as attention
from quire.kernels.attention.schedule.plan import AttnPlan, PlanBuffers, SharedPrefix
from quire.kernels.attention.variant import Variant
from quire.kernels.kvstore import entry
from quire.kernels.kvstore import op as kvstore
from quire.kernels.qkv import rotate_and_store


class KVPool:
    """`k` and `v`: [n_layers, n_pages, n_kv_heads, page_size, entry] of the model's dtype, or of int8, where an entry
    has its scale (`kernels.kvstore.entry`). Page 0 takes padding."""

    def __init__(self, arch: ModelArch, n_pages: int, page_size: int, dtype: torch.dtype, device: Device) -> None:
        size = entry.entry_size(arch.head_dim, dtype)
        shape = (arch.n_layers, n_pages, arch.n_kv_heads, page_size, size)
        self.n_heads, self.head_dim = arch.n_heads, arch.head_dim
        self.k = device.zeros(shape, dtype)
        self.v = device.zeros(shape, dtype)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        n_layers, _, n_kv_heads, _, size = self.k.shape
        return 2 * n_layers * n_kv_heads * size * self.k.element_size()

    def copy(self, copies: list[PageCopy]) -> None:
        """Copy on write, in every layer."""
        if not copies:
            return
        sources, targets, counts = ([getattr(one, name) for one in copies] for name in ("source", "target", "n_tokens"))
        for layer in range(self.k.shape[0]):
            kvstore.copy_pages(self.k[layer], self.v[layer], sources, targets, counts)


@dataclasses.dataclass(slots=True)
class PagedContext:
    """What attention layers need in one step: where rows are written and what they see."""

    pool: KVPool
    plan: AttnPlan
    cache_locs: torch.Tensor
    """int64 [n_rows]: where each row's K and V are written, page * page_size + offset."""

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
        pages = self.pool.k[layer], self.pool.v[layer]
        return rotate_and_store(qkv, q_norm, k_norm, eps, positions, cos_sin, *pages, self.cache_locs)

    def attend(self, layer: int, q: torch.Tensor, variant: Variant) -> torch.Tensor:
        """See `Context`."""
        return attention.run(q, self.pool.k[layer], self.pool.v[layer], self.plan, variant)


def plan_attention(
    pool: KVPool,
    tables: SlotTables,
    kv_lens: np.ndarray,
    slots: np.ndarray,
    q_indptr: np.ndarray | None = None,
    buffers: PlanBuffers | None = None,
    shared: Sequence[SharedPrefix] = (),
    settled: bool = False,
) -> AttnPlan:
    """The attention plan of a step on this pool (`kernels.attention.op.plan`); q_indptr None: one row a span."""
    return attention.plan(
        np.arange(len(kv_lens) + 1, dtype=np.int32) if q_indptr is None else q_indptr,
        kv_lens,
        slots,
        tables.pages,
        page_size=pool.k.shape[3],
        n_q_heads=pool.n_heads,
        n_kv_heads=pool.k.shape[2],
        head_dim=pool.head_dim,
        buffers=buffers,
        shared=shared,
        settled=settled,
    )
