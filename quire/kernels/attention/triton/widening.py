"""Pages in e4m3 as pages in the type of queries, for a kernel that multiplies these.

One program a page and KV head. Owns no decision when that pays (coded.py). Invariants: a number in e4m3 is one in
bfloat16 and in float16 exactly; a launch allocates its results alone and never waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_NUMBERS = 4096
"""Of a page of a head, that a program has in registers at once."""


def widened(
    k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, entries: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v: e4m3 [n_pages, n_kv_heads, page_size, head_dim], the tokens of a page and head contiguous. page_table:
    int32, contiguous. entries: int32 [n], places in it. Returns the pages of k and of v that these name, as [n,
    n_kv_heads, page_size, head_dim] of `dtype`, and a table like page_table that names them there; its other entries
    say anything."""
    _, n_kv_heads, page_size, head_dim = k.shape
    wide_k, wide_v = (
        torch.empty(len(entries), n_kv_heads, page_size, head_dim, dtype=dtype, device=k.device) for _ in range(2)
    )
    table, n_numbers = torch.empty_like(page_table), page_size * head_dim
    block = min(MOST_NUMBERS, int(triton.next_power_of_2(n_numbers)))
    _widen[(len(entries), n_kv_heads)](
        k, v, wide_k, wide_v, page_table, entries, table, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        N=n_numbers, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return wide_k, wide_v, table


@triton.jit(do_not_specialize_on_alignment=["entries"])  # type: ignore[untyped-decorator]
def _widen(  # type: ignore[no-untyped-def]
    k, v, wide_k, wide_v, pages, entries, table, k_page, k_head, v_page, v_head, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place, head = tl.program_id(0), tl.program_id(1)
    entry = tl.load(entries + place)
    page = tl.load(pages + entry).to(tl.int64)
    if head == 0:
        tl.store(table + entry, place)
    to = (place.to(tl.int64) * tl.num_programs(1) + head) * N
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < N
        of_k = tl.load(k + page * k_page + head * k_head + at, mask=live)
        of_v = tl.load(v + page * v_page + head * v_head + at, mask=live)
        tl.store(wide_k + to + at, of_k.to(wide_k.dtype.element_ty), mask=live)
        tl.store(wide_v + to + at, of_v.to(wide_v.dtype.element_ty), mask=live)
