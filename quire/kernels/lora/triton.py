"""Products with adapters on CUDA in two launches: into the small dimensions (shrink), and out of them (expand).

A program takes up to 16 rows of one adapter, which the step has sorted by adapter (as SGMV does: Chen et al. 2023,
"Punica", section 4). Sums over inputs are divided into a number of parts that depends on the matrix alone, and are
added up in their order by the second launch: so a row's bits do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm import Norm
from quire.kernels.lora.weight import BLOCK_OUT, TILE, Stack, Tiles
from quire.kernels.norm import rms_norm

BLOCK_IN = 128
MOST_PARTS = 8
"""Of the sum over inputs, each of at least `PART_IN` of them."""
PART_IN = 512
BLOCK_RANK = 16


def add(x: torch.Tensor, stack: Stack, tiles: Tiles, y: torch.Tensor, norm: Norm | None = None) -> None:
    """See op.py."""
    if norm is not None and x.dtype is torch.float16:  # what is not normed yet, times the weight, may be out of range
        x, norm = rms_norm(x, *norm), None
    n, k = x.shape
    n_tiles, n_sums = len(tiles.tiles), max(1, min(MOST_PARTS, k // PART_IN))
    if not n or not n_tiles:
        return
    width = stack.a.shape[1]
    inner = torch.empty(n_sums, n, width, dtype=torch.float32, device=x.device)
    squares = torch.empty(n_sums, n, dtype=torch.float32, device=x.device) if norm is not None else inner
    per_part = triton.cdiv(stack.most, BLOCK_RANK)
    step = triton.cdiv(triton.cdiv(k, n_sums), BLOCK_IN) * BLOCK_IN
    _shrink[(n_tiles, len(stack.sizes) * per_part, n_sums)](
        x, x.stride(0), stack.a, stack.a.stride(0), stack.ranks, stack.ranks.stride(0), tiles.order, tiles.tiles,
        x if norm is None else norm[0], inner, squares, n, k, step, PER_PART=per_part, MOST=stack.most,
        N_PARTS=len(stack.sizes), HAS_NORM=norm is not None, TILE=TILE, BLOCK_IN=BLOCK_IN, BLOCK_RANK=BLOCK_RANK,
        num_warps=4,
    )  # fmt: skip
    _expand[(n_tiles, len(stack.blocks))](
        y, y.stride(0), stack.b, stack.b.stride(0), stack.ranks, stack.ranks.stride(0), tiles.order, tiles.tiles,
        stack.blocks, inner, squares, n, 1.0 / k, 0.0 if norm is None else norm[1], N_SUMS=n_sums, MOST=stack.most,
        N_PARTS=len(stack.sizes), HAS_NORM=norm is not None, TILE=TILE, BLOCK_OUT=BLOCK_OUT, BLOCK_RANK=BLOCK_RANK,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x, x_row, a, a_place, ranks, ranks_place, order, tiles, weight, inner, squares, n, k, step, PER_PART: tl.constexpr,
    MOST: tl.constexpr, N_PARTS: tl.constexpr, HAS_NORM: tl.constexpr, TILE: tl.constexpr, BLOCK_IN: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    tile, column, part_of_sum = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = tl.load(tiles + tile * 3).to(tl.int64)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if count == 0:
        return
    part, start = column // PER_PART, (column % PER_PART) * BLOCK_RANK
    rank = tl.load(ranks + place * ranks_place + part)
    if HAS_NORM:
        if (start >= rank) & (column > 0):
            return
    elif start >= rank:
        return
    at = tl.arange(0, TILE)
    live = at < count
    rows = tl.load(order + first + at, mask=live, other=0).to(tl.int64)
    columns = start + tl.arange(0, BLOCK_RANK)
    lines = a + place * a_place + (part * MOST + columns[:, None]).to(tl.int64) * k
    total = tl.zeros((TILE, BLOCK_RANK), tl.float32)
    square = tl.zeros((TILE,), tl.float32)
    end = tl.minimum((part_of_sum + 1) * step, k)
    for i in range(part_of_sum * step, end, BLOCK_IN):
        inputs = i + tl.arange(0, BLOCK_IN)
        there = inputs < end
        numbers = tl.load(x + rows[:, None] * x_row + inputs[None, :], mask=live[:, None] & there[None, :], other=0.0)
        if HAS_NORM:
            wide = numbers.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            factor = tl.load(weight + inputs, mask=there, other=0.0).to(tl.float32)
            numbers = (wide * factor[None, :]).to(x.dtype.element_ty)
        matrix = tl.load(lines + inputs[None, :], mask=(columns[:, None] < rank) & there[None, :], other=0.0)
        total += tl.dot(numbers, tl.trans(matrix), input_precision="ieee")
    to = (part_of_sum * n + first + at).to(tl.int64)
    target = inner + to[:, None] * (N_PARTS * MOST) + part * MOST + columns[None, :]
    tl.store(target, total, mask=live[:, None] & (columns[None, :] < rank))
    if HAS_NORM:
        tl.store(squares + to, square, mask=at < tl.where(column == 0, count, 0))


@triton.jit(do_not_specialize=["n", "share", "eps"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    y, y_row, b, b_place, ranks, ranks_place, order, tiles, blocks, inner, squares, n, share, eps, N_SUMS: tl.constexpr,
    MOST: tl.constexpr, N_PARTS: tl.constexpr, HAS_NORM: tl.constexpr, TILE: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    place = tl.load(tiles + tile * 3).to(tl.int64)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    part = tl.load(blocks + block * 3)
    rank = tl.load(ranks + place * ranks_place + part, mask=count > 0, other=0)
    if rank == 0:
        return
    at = tl.arange(0, TILE)
    live = at < count
    rows = tl.load(order + first + at, mask=live, other=0).to(tl.int64)
    columns = tl.load(blocks + block * 3 + 1) + tl.arange(0, BLOCK_OUT)
    has = columns < tl.load(blocks + block * 3 + 2)
    factor = tl.full((TILE,), 1.0, tl.float32)
    if HAS_NORM:
        square = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(N_SUMS):
            square += tl.load(squares + (i * n + first + at).to(tl.int64), mask=live, other=0.0)
        factor = 1.0 / tl.sqrt(square * share + eps)
    total = tl.zeros((TILE, BLOCK_OUT), tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        ranked = start + tl.arange(0, BLOCK_RANK)
        small = tl.zeros((TILE, BLOCK_RANK), tl.float32)
        for i in tl.static_range(N_SUMS):
            line = (i * n + first + at).to(tl.int64)[:, None] * (N_PARTS * MOST) + part * MOST
            small += tl.load(inner + line + ranked[None, :], mask=live[:, None] & (ranked[None, :] < rank), other=0.0)
        matrix = b + place * b_place + columns[:, None].to(tl.int64) * MOST + ranked[None, :]
        numbers = tl.load(matrix, mask=has[:, None] & (ranked[None, :] < rank), other=0.0)
        small = (small * factor[:, None]).to(b.dtype.element_ty)
        total += tl.dot(small, tl.trans(numbers), input_precision="ieee")
    place_of = y + rows[:, None] * y_row + columns[None, :]
    mask = live[:, None] & has[None, :]
    before = tl.load(place_of, mask=mask, other=0.0).to(tl.float32)
    tl.store(place_of, (before + total).to(y.dtype.element_ty), mask=mask)
