"""Public attention. Checks shapes and picks the implementation by device."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.kernels import backends
from quire.kernels.attention.plan import AttnPlan, PlanBuffers, Variant


def plan(
    q_indptr: np.ndarray,
    kv_lens: np.ndarray,
    slots: np.ndarray,
    page_table: torch.Tensor,
    *,
    page_size: int,
    n_q_heads: int,
    n_kv_heads: int,
    head_dim: int,
    buffers: PlanBuffers | None = None,
) -> AttnPlan:
    """Prepare attention for the spans of one step, for all layers.

    q_indptr: int32 [n_spans + 1], rows of each span in the flat batch (empty spans allowed). kv_lens: int32 [n_spans],
    start + length of each span after this step. slots: int32 [n_spans], rows of page_table. page_table: int32
    [n_slots, max_pages] on the device where `run` executes. buffers: from `plan_buffers`, to keep all addresses and
    grids of the step fixed; they hold one plan at a time. Raises ValueError on a mismatch.
    """
    lengths = np.diff(q_indptr)
    if not len(q_indptr) == len(kv_lens) + 1 == len(slots) + 1 or q_indptr[0] != 0:
        raise ValueError(f"q_indptr has {len(q_indptr)} entries for {len(kv_lens)} kv_lens and {len(slots)} slots")
    if (lengths < 0).any() or (kv_lens < lengths).any():
        raise ValueError("a span must have 0 <= length <= kv_len")
    if n_q_heads % n_kv_heads:
        raise ValueError(f"{n_q_heads} query heads are not a multiple of {n_kv_heads} KV heads")
    longest = int(kv_lens.max(initial=0))
    if longest > page_table.shape[1] * page_size:
        raise ValueError(f"{longest} tokens do not fit {page_table.shape[1]} pages of {page_size} tokens")
    bare = AttnPlan(
        q_indptr=np.ascontiguousarray(q_indptr, np.int32),
        kv_lens=np.ascontiguousarray(kv_lens, np.int32),
        slots=np.ascontiguousarray(slots, np.int32),
        page_table=page_table,
        page_size=page_size,
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
    )
    tiles = buffers.fill(bare) if buffers else backends.module("attention", page_table.device.type).tiles(bare)
    return dataclasses.replace(bare, tiles=tiles)


def plan_buffers(like: AttnPlan, max_spans: int) -> PlanBuffers:
    """Buffers for steps with the heads, page size and device of `like`, of at most `max_spans` spans of few tokens.

    A span may have max(1, 16 // group) tokens (group: query heads of a KV head). A CUDA graph captured around `run`
    with a plan from these buffers serves every later plan that was written into them before the replay. CUDA only.
    """
    return backends.module("attention", like.page_table.device.type).Buffers(like, max_spans)


def run(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each row of q to the keys and values of its own sequence, read from pages.

    q: [n, n_q_heads, head_dim], n >= q_indptr[-1], last dimension contiguous; rows beyond q_indptr[-1] are padding.
    k_pages, v_pages: [n_pages, n_kv_heads, page_size, head_dim], contiguous, q's dtype, this step's keys and values
    already stored. out: like q, contiguous, or None to allocate. Returns out; its padding rows hold anything.
    Row i of span s stands at position kv_lens[s] - (q_indptr[s + 1] - i). Raises ValueError on a mismatch.
    """
    _check(q, k_pages, v_pages, plan)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} {out.dtype} must be contiguous and like q {tuple(q.shape)} {q.dtype}")
    return backends.module("attention", q.device.type).run(q, k_pages, v_pages, plan, variant, out)


def _check(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, plan: AttnPlan) -> None:
    pool = (plan.n_kv_heads, plan.page_size, plan.head_dim)
    if k_pages.shape[1:] != pool or v_pages.shape != k_pages.shape:
        raise ValueError(f"pages {tuple(k_pages.shape)}, {tuple(v_pages.shape)} do not fit the plan [n_pages, {pool}]")
    if q.shape[1:] != (plan.n_q_heads, plan.head_dim) or q.shape[0] < plan.q_indptr[-1] or q.stride(2) != 1:
        raise ValueError(f"q {tuple(q.shape)} does not fit a plan of {plan.q_indptr[-1]} rows, {plan.n_q_heads} heads")
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"q is {q.dtype} but pages are {k_pages.dtype}, {v_pages.dtype}")
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k_pages and v_pages must be contiguous")
