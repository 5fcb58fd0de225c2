"""The work of a step on the CPU: its spans cut into tiles of tokens, and the plan as C sees it.

Invariant: no cut changes a bit of the output (csrc/cpu/attention.cpp). Shared prefixes of a plan are not used: each
span reads its keys itself.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import torch

from quire.kernels.attention.schedule.plan import AttnPlan, Layout

TILE_ROWS = 192
"""Rows (tokens x query heads of a group) that share one pass over the keys: enough to pay for repacking a block."""


class _NativePlan(ctypes.Structure):
    """QuireAttnPlan in csrc/cpu/quire_cpu.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_indptr", "kv_lens", "kv_at", "block_indptr", "blocks")),
        *((name, ctypes.c_void_p) for name in ("tiles", "page_table", "tree_paths", "tree_firsts")),
        *((name, ctypes.c_int64) for name in ("table_stride", "work")),
        *((name, ctypes.c_int32) for name in ("layout", "n_tiles", "page_size")),
        *((name, ctypes.c_int32) for name in ("n_q_heads", "n_kv_heads", "head_dim")),
    ]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CpuWork:
    """The plan as C sees it, and the array that it points into."""

    native: _NativePlan
    tiles: np.ndarray
    """int32 [n_tiles, 3]: span, first token inside the span, number of tokens; most expensive first."""

    def on(self, page_table: torch.Tensor) -> CpuWork:
        """See `AttnPlan.on`."""
        native = _NativePlan.from_buffer_copy(self.native)
        native.page_table = page_table.data_ptr()
        return CpuWork(native, self.tiles)


def make(plan: AttnPlan, device: torch.device | None = None) -> CpuWork:
    """The plan's work: its spans cut into tiles. `plan` must outlive it."""
    heads, spans, table = plan.heads, plan.spans, plan.page_table
    paths = (None, None) if spans.trees is None else (spans.trees.paths, spans.trees.firsts)
    tiles, work = cut(plan, max(1, TILE_ROWS // heads.group))
    seen_by_c = _NativePlan(
        *map(_address, (spans.q_indptr, spans.kv_lens, spans.kv_at, spans.block_indptr, spans.blocks, tiles)),
        None if table is None else table.data_ptr(), *map(_address, paths),
        0 if table is None else table.stride(0), work,
        plan.layout, len(tiles), plan.page_size, heads.n_q_heads, heads.n_kv_heads, heads.head_dim,
    )  # fmt: skip
    return CpuWork(seen_by_c, tiles)


def cut(plan: AttnPlan, tile_tokens: int) -> tuple[np.ndarray, int]:
    """Tiles of at most `tile_tokens` tokens, int32 [n_tiles, 3], by falling cost, and about all multiplications."""
    heads, lengths = plan.heads, plan.spans.lengths
    counts = -(-lengths // tile_tokens)
    spans = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    index = np.arange(len(spans), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * tile_tokens
    n_tokens = np.minimum(lengths[spans] - first, tile_tokens)
    n_keys = plan.spans.kv_lens[spans].astype(np.int64)
    if plan.causal:
        n_keys += first + n_tokens - lengths[spans]
    if plan.window:
        n_keys = np.minimum(n_keys, plan.window + n_tokens + plan.n_first)
    if plan.layout is Layout.SPARSE:
        n_keys = np.minimum(n_keys, np.diff(plan.spans.listed[0])[spans] * plan.page_size)
    order = np.argsort(-n_tokens * n_keys, kind="stable")
    work = int(((n_tokens * heads.group + 4) * n_keys).sum()) * heads.head_dim * heads.n_kv_heads
    return np.ascontiguousarray(np.stack((spans, first, n_tokens), axis=1)[order], np.int32), work


def _address(values: np.ndarray | None) -> int | None:
    return None if values is None else values.ctypes.data
