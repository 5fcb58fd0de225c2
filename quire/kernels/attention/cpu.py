"""Attention on CPU: the native library for float32, bfloat16 and float16, else the torch reference.

Owns the cutting of spans into tiles of tokens. Invariant: no cut changes a bit of the output (csrc/cpu/attention.cpp).
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import torch

from quire.kernels import native
from quire.kernels.attention import reference
from quire.kernels.attention.plan import AttnPlan, Variant

TILE_ROWS = 96
"""Rows (tokens x query heads of a group) that share one pass over the keys: enough to pay for repacking a block."""


class _NativePlan(ctypes.Structure):
    """QuireAttnPlan in csrc/cpu/quire_cpu.h."""

    _fields_ = [
        ("q_indptr", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("n_tiles", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("n_q_heads", ctypes.c_int32),
        ("n_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
    ]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CpuTiles:
    """The plan as C sees it, and the array that it points into."""

    native: _NativePlan
    tiles: np.ndarray
    """int32 [n_tiles, 3]: span, first token inside the span, number of tokens; most expensive first."""


def tiles(plan: AttnPlan) -> CpuTiles:
    """Cut the spans into tiles."""
    if plan.page_table.dtype != torch.int32 or plan.page_table.stride(1) != 1:
        raise ValueError(f"page_table must be int32 with contiguous rows, not {plan.page_table.dtype}")
    table = cut(plan.q_indptr, plan.kv_lens, max(1, TILE_ROWS * plan.n_kv_heads // plan.n_q_heads))
    seen_by_c = _NativePlan(
        plan.q_indptr.ctypes.data, plan.kv_lens.ctypes.data, plan.slots.ctypes.data, table.ctypes.data,
        plan.page_table.data_ptr(), plan.page_table.stride(0),
        len(table), plan.page_size, plan.n_q_heads, plan.n_kv_heads, plan.head_dim,
    )  # fmt: skip
    return CpuTiles(seen_by_c, table)


def cut(q_indptr: np.ndarray, kv_lens: np.ndarray, tile_tokens: int) -> np.ndarray:
    """Tiles of at most `tile_tokens` tokens, int32 [n_tiles, 3], by falling cost (tokens x keys)."""
    lengths = np.diff(q_indptr)
    counts = -(-lengths // tile_tokens)
    spans = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    index = np.arange(len(spans), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * tile_tokens
    n_tokens = np.minimum(lengths[spans] - first, tile_tokens)
    last_key = kv_lens[spans] - lengths[spans] + first + n_tokens
    order = np.argsort(-n_tokens.astype(np.int64) * last_key, kind="stable")
    return np.ascontiguousarray(np.stack((spans, first, n_tokens), axis=1)[order], np.int32)


def run(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
) -> torch.Tensor:
    """See op.py."""
    library = native.library()
    if library is None or q.dtype not in native.DTYPES:
        return reference.run(q, k_pages, v_pages, plan, variant, out)
    library.quire_attention(
        ctypes.byref(plan.tiles.native), native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), q.stride(1),
        k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr(),
        variant.scale, variant.window, variant.softcap, torch.get_num_threads(),
    )  # fmt: skip
    return out
