"""Attention on CUDA: one kernel for prefill and decode over pages, and one that merges split tiles in fixed order.

Flash attention (Dao 2022, algorithm 1) with packed rows (tokens x query heads of a KV head), key blocks gathered
through the page table. Nothing waits for the device; with `Buffers` all addresses and grids are fixed, so that a decode
step can be captured in a CUDA graph.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels import transfer
from quire.kernels.attention.plan import AttnPlan, Variant
from quire.kernels.attention.tiles import MERGE_FIELDS, TILE_FIELDS, Shape, TileList, cut

LOG2E = 1.4426950408889634
PROGRAMS_PER_SM = 4
MERGED_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CudaTiles:
    """The work of one step on the device."""

    shape: Shape
    tiles: torch.Tensor
    """int32 [n_small + n_large, TILE_FIELDS]; a line with n_tokens = 0 is skipped."""
    merges: torch.Tensor
    """int32 [n, MERGE_FIELDS]; a line with no splits is skipped."""
    n_small: int
    n_large: int
    partial_out: torch.Tensor
    """float32 [n_kv_heads, n_partial_rows, head_dim]."""
    partial_lse: torch.Tensor
    """float32 [n_kv_heads, n_partial_rows], base 2."""


def shape_of(plan: AttnPlan, n_programs: int) -> Shape:
    """Tile sizes for a plan's heads."""
    group = plan.n_q_heads // plan.n_kv_heads
    fits = triton.next_power_of_2(group)
    large = 128 if plan.head_dim <= 128 else 64
    return Shape(group, plan.n_kv_heads, max(16, fits), max(large, fits), n_programs)


def n_programs_of(device: torch.device) -> int:
    """Programs that fill a device evenly."""
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def tiles(plan: AttnPlan, n_programs: int = 0) -> CudaTiles:
    """Cut the step and send it to the device in one copy. n_programs: 0 asks the device."""
    device = plan.page_table.device
    shape = shape_of(plan, n_programs or n_programs_of(device))
    work = cut(plan.q_indptr, plan.kv_lens, plan.slots, shape)
    flat = transfer.upload(np.concatenate((work.tiles.reshape(-1), work.merges.reshape(-1))), device)
    return CudaTiles(
        shape=shape,
        tiles=flat[: work.tiles.size].view(-1, TILE_FIELDS),
        merges=flat[work.tiles.size :].view(-1, MERGE_FIELDS),
        n_small=work.n_small,
        n_large=len(work.tiles) - work.n_small,
        partial_out=torch.empty(plan.n_kv_heads, work.n_partial_rows, plan.head_dim, device=device),
        partial_lse=torch.empty(plan.n_kv_heads, work.n_partial_rows, device=device),
    )


class Buffers:
    """Device memory with fixed addresses for decode steps of at most `max_spans` spans, each fitting a small tile."""

    def __init__(self, plan: AttnPlan, max_spans: int, n_programs: int = 0) -> None:
        """plan: any plan of the same heads, page size and device; only its shape is used."""
        device = plan.page_table.device
        shape = shape_of(plan, n_programs or n_programs_of(device))
        most_tiles = max_spans + shape.most_splits
        # A split span has at least one tile more than a whole one, so at most `most_splits` spans are split.
        most_merges = min(max_spans, shape.most_splits) * shape.small_rows
        self._sizes = (most_tiles * TILE_FIELDS, most_merges * MERGE_FIELDS)
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        n_rows = most_tiles * shape.small_rows
        self.max_spans = max_spans
        self.tiles = CudaTiles(
            shape=shape,
            tiles=self._flat[: self._sizes[0]].view(-1, TILE_FIELDS),
            merges=self._flat[self._sizes[0] :].view(-1, MERGE_FIELDS),
            n_small=most_tiles,
            n_large=0,
            partial_out=torch.empty(plan.n_kv_heads, n_rows, plan.head_dim, device=device),
            partial_lse=torch.empty(plan.n_kv_heads, n_rows, device=device),
        )

    def fill(self, plan: AttnPlan) -> CudaTiles:
        """Write a step's tiles, in stream order, in one copy. Raises ValueError when the step does not fit."""
        shape = self.tiles.shape
        longest = int(np.diff(plan.q_indptr).max(initial=0))
        if len(plan.slots) > self.max_spans or longest > shape.small_tokens:
            raise ValueError(
                f"{len(plan.slots)} spans of up to {longest} tokens do not fit buffers for {self.max_spans} spans "
                f"of {shape.small_tokens}: plan without buffers"
            )
        work: TileList = cut(plan.q_indptr, plan.kv_lens, plan.slots, shape)
        lines = np.zeros(sum(self._sizes), np.int32)
        lines[: work.tiles.size] = work.tiles.reshape(-1)
        lines[self._sizes[0] : self._sizes[0] + work.merges.size] = work.merges.reshape(-1)
        transfer.write(lines, self._flat)
        return self.tiles


def run(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
) -> torch.Tensor:
    """See op.py."""
    work: CudaTiles = plan.tiles
    if work.n_small:
        _launch(q, k_pages, v_pages, plan, variant, out, (0, work.n_small), work.shape.small_rows)
    if work.n_large:
        _launch(q, k_pages, v_pages, plan, variant, out, (work.n_small, work.n_large), work.shape.large_rows)
    if len(work.merges):
        _merge[(len(work.merges), plan.n_kv_heads)](
            work.merges, work.partial_out, work.partial_lse, out, work.partial_lse.stride(0), plan.n_q_heads,
            GROUP=work.shape.group, D=plan.head_dim, BLOCK_D=_padded(plan.head_dim), BLOCK_S=MERGED_AT_ONCE,
            FIELDS=MERGE_FIELDS, num_warps=4,
        )  # fmt: skip
    return out


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _launch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lines: tuple[int, int],
    n_rows: int,
) -> None:
    """One kind of tiles: `lines` is (first line, number of lines)."""
    work: CudaTiles = plan.tiles
    block_n, n_warps, n_stages = _blocking(n_rows, _padded(plan.head_dim) * q.element_size())
    _attend[(lines[1], plan.n_kv_heads)](
        q, k_pages, v_pages, out, work.tiles[lines[0] :], plan.page_table, work.partial_out, work.partial_lse,
        q.stride(0), q.stride(1), plan.page_table.stride(0), work.partial_lse.stride(0),
        plan.n_kv_heads, variant.scale, variant.softcap, variant.window,
        PAGE=plan.page_size, GROUP=work.shape.group, D=plan.head_dim, BLOCK_D=_padded(plan.head_dim),
        BLOCK_M=n_rows, BLOCK_N=block_n, WINDOWED=variant.window > 0, CAPPED=variant.softcap > 0,
        FIELDS=TILE_FIELDS, num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip


def _blocking(n_rows: int, row_bytes: int) -> tuple[int, int, int]:
    """(keys of a block, warps, pipeline stages) for tiles of n_rows and keys of row_bytes; blocks divide KEY_STEP.

    Measured on an H200 at 256 bytes a row (docs/lab-notes.md, "Blocks of the first attention kernel").
    """
    narrow = row_bytes <= 256
    if n_rows <= 32:  # bound by memory: stages keep several key blocks in flight
        return (128, 4, 4) if narrow else (32, 4, 5)
    if n_rows >= 128 and narrow:
        return 128, 8, 2
    return 64 if narrow else 32, 8 if n_rows >= 128 else 4, 3 if row_bytes <= 512 else 2


@triton.jit
def _fold(
    q, k_pages, v_pages, table_row, kv_head, n_kv_heads, begin, end, row_position, top, total, acc, scale, softcap,
    window, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys begin .. end - 1 into the running maximum, sum and weighted values. Unmasked: every row sees all."""
    dims = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        live = keys < end
        pages = tl.load(table_row + keys // PAGE, mask=live, other=0).to(tl.int64)
        cells = ((pages * n_kv_heads + kv_head) * PAGE + keys % PAGE) * D
        if D == BLOCK_D and not MASKED:
            k = tl.load(k_pages + cells[None, :] + dims[:, None])
            v = tl.load(v_pages + cells[:, None] + dims[None, :])
        else:
            k = tl.load(k_pages + cells[None, :] + dims[:, None], mask=live[None, :] & (dims < D)[:, None], other=0.0)
            v = tl.load(v_pages + cells[:, None] + dims[None, :], mask=live[:, None] & (dims < D)[None, :], other=0.0)
        s = tl.dot(q, k, input_precision="ieee")
        if CAPPED:
            s = softcap * 1.4426950408889634 * (2.0 * tl.sigmoid(2.0 * s * (scale / softcap)) - 1.0)
        else:
            s = s * (scale * 1.4426950408889634)
        if MASKED:
            seen = live[None, :] & (keys[None, :] <= row_position[:, None])
            if WINDOWED:
                seen = seen & (keys[None, :] > row_position[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s - base[:, None])
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = now
    return top, total, acc


@triton.jit(do_not_specialize=["n_partial_rows"])
def _attend(
    q_base, k_pages, v_pages, out, tiles, page_table, partial_out, partial_lse,
    q_row_stride, q_head_stride, table_stride, n_partial_rows, n_kv_heads, scale, softcap, window,
    PAGE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One tile for one KV head."""
    line = tiles + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    n_tokens = tl.load(line + 1)
    if n_tokens == 0:
        return
    q_row, slot, position = tl.load(line).to(tl.int64), tl.load(line + 2).to(tl.int64), tl.load(line + 3)
    begin, end, partial = tl.load(line + 4), tl.load(line + 5), tl.load(line + 6)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    live = (token < n_tokens)[:, None] & (dims < D)[None, :]
    q_at = q_base + ((q_row + token) * q_row_stride + head * q_head_stride)[:, None] + dims[None, :]
    q = tl.load(q_at, mask=live, other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_row = page_table + slot * table_stride
    row_position = position + token
    if WINDOWED:
        lowest = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
        all_seen = tl.maximum(begin, lowest)  # with a window every block is masked
    else:
        all_seen = tl.maximum(begin, tl.minimum(end, position + 1) // BLOCK_N * BLOCK_N)
        top, total, acc = _fold(
            q, k_pages, v_pages, table_row, kv_head, n_kv_heads, begin, all_seen, row_position, top, total, acc,
            scale, softcap, window, PAGE, D, BLOCK_D, BLOCK_N, WINDOWED, CAPPED, False,
        )  # fmt: skip
    top, total, acc = _fold(
        q, k_pages, v_pages, table_row, kv_head, n_kv_heads, all_seen, end, row_position, top, total, acc,
        scale, softcap, window, PAGE, D, BLOCK_D, BLOCK_N, WINDOWED, CAPPED, True,
    )  # fmt: skip

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if partial < 0:
        out_at = out + ((q_row + token) * (n_kv_heads * GROUP) + head)[:, None] * D + dims[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=live)
    else:
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        row = kv_head.to(tl.int64) * n_partial_rows + partial + rows
        tl.store(partial_out + row[:, None] * D + dims[None, :], result, mask=live)
        tl.store(partial_lse + row, lse, mask=token < n_tokens)


@triton.jit(do_not_specialize=["n_partial_rows"])
def _merge(
    merges, partial_out, partial_lse, out, n_partial_rows, n_q_heads, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One packed row: the mean of its partial results weighted by 2^lse, BLOCK_S splits at a time, in order."""
    line = merges + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1).to(tl.int64)
    first, step, n_splits, packed = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    if n_splits == 0:
        return
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for i in range(0, n_splits, BLOCK_S):
        splits = i + tl.arange(0, BLOCK_S)
        row = kv_head * n_partial_rows + first + splits * step
        lse = tl.load(partial_lse + row, mask=splits < n_splits, other=float("-inf"))
        live = (lse > float("-inf"))[:, None] & (dims < D)[None, :]
        part = tl.load(partial_out + row[:, None] * D + dims[None, :], mask=live, other=0.0)
        now = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2(lse - base)
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(part * weight[:, None], 0)
        top = now
    row = (packed // GROUP).to(tl.int64) * n_q_heads + kv_head * GROUP + packed % GROUP
    tl.store(out + row * D + dims, (acc / total).to(out.dtype.element_ty), mask=dims < D)
