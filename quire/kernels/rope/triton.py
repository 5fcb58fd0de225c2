"""Rotary embedding on CUDA, in place: one program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py. q and k are changed in place."""
    half = cos_sin.shape[1] // 2
    if q.shape[0] and half:
        _rope[(q.shape[0],)](
            q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1), positions, cos_sin, cos_sin.stride(0),
            HQ=q.shape[1], HK=k.shape[1], HALF=half, BLOCK_Q=triton.next_power_of_2(q.shape[1]),
            BLOCK_K=triton.next_power_of_2(k.shape[1]), BLOCK=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip
    return q, k


@triton.jit
def _rope(
    q, q_row, q_head, k, k_row, k_head, positions, cos_sin, table_stride, HQ: tl.constexpr, HK: tl.constexpr,
    HALF: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    table = cos_sin + tl.load(positions + i).to(tl.int64) * table_stride + at
    cos = tl.load(table, mask=at < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF, mask=at < HALF, other=0.0)[None, :]
    _rotate(q + i * q_row, q_head, cos, sin, HQ, HALF, BLOCK_Q, BLOCK)
    _rotate(k + i * k_row, k_head, cos, sin, HK, HALF, BLOCK_K, BLOCK)


@triton.jit
def _rotate(
    x, head_stride, cos, sin, N: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    heads, at = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
    live = (heads < N)[:, None] & (at < HALF)[None, :]
    low = x + heads[:, None] * head_stride + at[None, :]
    a = tl.load(low, mask=live, other=0.0).to(tl.float32)
    b = tl.load(low + HALF, mask=live, other=0.0).to(tl.float32)
    tl.store(low, (a * cos - b * sin).to(x.dtype.element_ty), mask=live)
    tl.store(low + HALF, (b * cos + a * sin).to(x.dtype.element_ty), mask=live)
