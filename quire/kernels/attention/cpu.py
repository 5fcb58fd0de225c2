"""Attention on CPU: the native library for float32, bfloat16 and float16, with keys and values of that type
or in entries of 8 bits (kernels.kvstore.entry); hooks are compiled into one of their own.

Owns the cutting of spans into tiles of tokens and the call into C. Invariant: no cut changes a bit of the output
(csrc/cpu/attention.cpp). Shared prefixes of a plan are not used: each span reads its keys itself.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import torch

from quire.kernels import native
from quire.kernels.attention import cpu_hooks
from quire.kernels.attention.plan import AttnPlan, Layout
from quire.kernels.attention.variant import MAX_PARAMS, Variant

TILE_ROWS = 192
"""Rows (tokens x query heads of a group) that share one pass over the keys: enough to pay for repacking a block."""

MAX_HEAD_DIM = 512


class _NativePlan(ctypes.Structure):
    """QuireAttnPlan in csrc/cpu/quire_cpu.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_indptr", "kv_lens", "kv_at", "block_indptr", "blocks")),
        *((name, ctypes.c_void_p) for name in ("tiles", "page_table")),
        *((name, ctypes.c_int64) for name in ("table_stride", "work")),
        *((name, ctypes.c_int32) for name in ("layout", "n_tiles", "page_size")),
        *((name, ctypes.c_int32) for name in ("n_q_heads", "n_kv_heads", "head_dim")),
    ]


class _NativeArgs(ctypes.Structure):
    """QuireAttnArgs in csrc/cpu/quire_cpu.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("plan", "q", "k", "v", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_page", "k_head", "k_token")),
        *((name, ctypes.c_int64) for name in ("v_page", "v_head", "v_token")),
        *((name, ctypes.c_int32) for name in ("dtype", "int8_keys", "causal", "window", "n_first", "n_threads")),
        ("scale", ctypes.c_float),
        ("scalars", ctypes.c_float * MAX_PARAMS),
        ("tensors", ctypes.c_void_p * MAX_PARAMS),
    ]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CpuWork:
    """The plan as C sees it, and the array that it points into."""

    native: _NativePlan
    tiles: np.ndarray
    """int32 [n_tiles, 3]: span, first token inside the span, number of tokens; most expensive first."""


def make(plan: AttnPlan, device: torch.device | None = None) -> CpuWork:
    """The plan's work: its spans cut into tiles. `plan` must outlive it."""
    heads, spans, table = plan.heads, plan.spans, plan.page_table
    tiles, work = cut(plan, max(1, TILE_ROWS // heads.group))
    seen_by_c = _NativePlan(
        *map(_address, (spans.q_indptr, spans.kv_lens, spans.kv_at, spans.block_indptr, spans.blocks, tiles)),
        None if table is None else table.data_ptr(), 0 if table is None else table.stride(0), work,
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


def obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why this cannot run here, or None. Builds the hooks of the variant, once for each program and dtype."""
    if native.library() is None:
        return native.explain()
    if q_dtype not in native.DTYPES or kv_dtype not in (q_dtype, torch.int8):
        return (
            "the native kernels take float32, bfloat16 or float16 for q, and the same or int8 for k and v, not "
            f"{q_dtype} and {kv_dtype}"
        )
    if plan.heads.head_dim > MAX_HEAD_DIM:
        return f"the native kernels take head_dim up to {MAX_HEAD_DIM}, not {plan.heads.head_dim}"
    return cpu_hooks.obstacle(variant, q_dtype, kv_dtype)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See `op.run`. There must be no obstacle."""
    hooks = cpu_hooks.compiled(variant, q.dtype, k.dtype)
    arguments = native_args(q, k, v, variant, out, plan.layout)
    arguments.plan, arguments.n_threads = ctypes.addressof(plan.work.native), torch.get_num_threads()
    arguments.lse = None if lse is None else lse.data_ptr()
    arguments.scalars, arguments.tensors = hooks.scalars, hooks.tensors
    hooks.function(ctypes.byref(arguments))


def native_args(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    out: torch.Tensor,
    layout: Layout = Layout.PAGED,
) -> _NativeArgs:
    """The call as C sees it, for a variant without hooks; plan, threads and lse are still to be filled in."""
    return _NativeArgs(
        None, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), None,
        q.stride(0), q.stride(1), *_strides(k, layout), *_strides(v, layout),
        native.DTYPES[q.dtype], k.dtype == torch.int8,
        variant.causal, variant.window, variant.n_first, 0, variant.scale,
    )  # fmt: skip


def _strides(x: torch.Tensor, layout: Layout) -> tuple[int, int, int]:
    """Elements from page to page, head to head, token to token."""
    if layout is Layout.RAGGED:
        token, head, _ = x.stride()
        return 0, head, token
    page, head, token, _ = x.stride()
    return page, head, token


def _address(values: np.ndarray | None) -> int | None:
    return None if values is None else values.ctypes.data
