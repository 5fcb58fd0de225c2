"""Copies of pages on CUDA: one program a page, head and part of an entry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels import transfer

MOST_DIMS = 256
"""Of an entry, by one program: a model's state is longer than a key."""


def copy_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    n_tokens: Sequence[int],
) -> None:
    """See op.py."""
    _, n_kv_heads, page_size, d = k_pages.shape
    lines = transfer.upload(np.stack((sources, targets, n_tokens), axis=1).astype(np.int32), k_pages.device)
    block_d = min(MOST_DIMS, triton.next_power_of_2(d))
    _copy[(len(sources), n_kv_heads, triton.cdiv(d, block_d))](
        k_pages, v_pages, lines, HEADS=n_kv_heads, PAGE=page_size, D=d, BLOCK_P=triton.next_power_of_2(page_size),
        BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    k_pages, v_pages, lines, HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    line, head = lines + tl.program_id(0) * 3, tl.program_id(1)
    source, target, n_tokens = tl.load(line).to(tl.int64), tl.load(line + 1).to(tl.int64), tl.load(line + 2)
    offsets, dims = tl.arange(0, BLOCK_P)[:, None], (tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    live = (offsets < n_tokens) & (dims < D)
    inside = offsets * D + dims
    old, new = (source * HEADS + head) * PAGE * D + inside, (target * HEADS + head) * PAGE * D + inside
    tl.store(k_pages + new, tl.load(k_pages + old, mask=live), mask=live)
    tl.store(v_pages + new, tl.load(v_pages + old, mask=live), mask=live)
