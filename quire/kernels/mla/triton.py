"""Lines of latent attention on CUDA in one launch: a program for the line of a row, and some for heads of its query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS = 16
"""Of a query, by one program."""


def store(
    lines: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    q: torch.Tensor,
    rotated: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pages: torch.Tensor,
    cache_locs: torch.Tensor,
) -> None:
    """See op.py."""
    (n, n_heads, d), rank = q.shape, len(norm)
    heads = min(HEADS, triton.next_power_of_2(n_heads))
    if n:
        _store[(n, 1 + triton.cdiv(n_heads, heads))](
            lines, lines.stride(0), norm, eps, q, q.stride(0), q.stride(1), rotated, rotated.stride(0),
            rotated.stride(1), positions, cos_sin, pages, cache_locs, N_HEADS=n_heads, RANK=rank, HALF=d // 2,
            HEADS=heads, BLOCK_RANK=triton.next_power_of_2(rank), BLOCK_HALF=triton.next_power_of_2(d // 2),
            num_warps=4,
        )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["eps"], do_not_specialize_on_alignment=["positions", "cache_locs"]
)
def _store(  # type: ignore[no-untyped-def]
    lines, line_stride, norm, eps, q, q_row, q_head, rotated, to_row, to_head, positions, cos_sin, pages, cache_locs,
    N_HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK_HALF)
    table = cos_sin + tl.load(positions + i).to(tl.int64) * (2 * HALF)
    cos = tl.load(table + at, mask=at < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF + at, mask=at < HALF, other=0.0)[None, :]
    if part == 0:
        entry = pages + tl.load(cache_locs + i) * (RANK + 2 * HALF)
        line = lines + i * line_stride
        dtype = pages.dtype.element_ty
        dims = tl.arange(0, BLOCK_RANK)
        x = tl.load(line + dims, mask=dims < RANK, other=0.0).to(tl.float32)
        weight = tl.load(norm + dims, mask=dims < RANK, other=0.0).to(tl.float32)
        normed = (x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / RANK + eps))).to(dtype).to(tl.float32)
        tl.store(entry + dims, (normed * weight).to(dtype), mask=dims < RANK)
        _rotate(line + RANK + at[None, :], entry + RANK + at[None, :], (at < HALF)[None, :], cos, sin, HALF)
    else:
        head = ((part - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        live = (head < N_HEADS) & (at < HALF)[None, :]
        source, target = q + i * q_row + head * q_head, rotated + i * to_row + head * to_head
        _rotate(source + at[None, :], target + at[None, :], live, cos, sin, HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(source, target, live, cos, sin, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.load(source, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(dtype), mask=live)
    tl.store(target + HALF, (second * cos + first * sin).to(dtype), mask=live)
