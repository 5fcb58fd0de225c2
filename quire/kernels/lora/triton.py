"""Products with adapters on CUDA in two launches: into the small dimensions (shrink), and out of them (expand).

A program takes a tile of rows of one adapter, which the step has sorted by adapter (as SGMV does: Chen et al. 2023,
"Punica", section 4), 16 at once by the same instructions however many there are. Sums over inputs are divided into a
number of parts that depends on the matrix alone, and are added up in their order by the second launch: so a row's bits
do not depend on the others.

Both launches are programmatic dependents: each begins before the one before it has ended. What stays as it is during a
step (tiles, ranks, A, B) is read ahead of the wait. So is y by the second, as each program of the first has waited for
the product that made it before it lets the second begin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.act.triton import swiglu
from quire.kernels.gemm import Norm
from quire.kernels.hopper import has_dependent_launch
from quire.kernels.lora.weight import BLOCK_OUT, TILE, Stack, Tiles, tile_of
from quire.kernels.norm import rms_norm

MOST_PARTS = 16
"""Of the sum over inputs, each of at least `PART_IN` of them."""
PART_IN = 1024
SLICES, SLICE = 4, 128
"""Inputs that a program of the first product multiplies at once: a slice for each of its warps."""
BLOCK_RANK = 16
EXPAND_WARPS = 8
MAX_REGISTERS = 80
"""Of a thread of the second product, in two bytes and of one block of ranks, which needs no more."""


def add(
    x: torch.Tensor, stack: Stack, tiles: Tiles, y: torch.Tensor, norm: Norm | None = None,
    activated: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """See op.py."""
    if norm is not None and x.dtype is torch.float16:  # what is not normed yet, times the weight, may be out of range
        x, norm = rms_norm(x, *norm), None
    n, k = x.shape
    n_tiles = len(tiles.tiles)
    if not n or not n_tiles:
        return
    step = part_inputs(k)
    n_sums, per_part = triton.cdiv(k, step), triton.cdiv(stack.most, BLOCK_RANK)
    inner = torch.empty(n, n_sums, stack.a.shape[1], dtype=torch.float32, device=x.device)
    squares = torch.empty(n, n_sums, dtype=torch.float32, device=x.device) if norm is not None else inner
    dependent = has_dependent_launch(x.device)
    same = {"MOST": stack.most, "N_PARTS": len(stack.sizes), "HAS_NORM": norm is not None, "TILE": TILE}
    same |= {"N_SUMS": n_sums, "BLOCK_RANK": BLOCK_RANK, "DEPENDENT": dependent, "launch_pdl": dependent}
    _shrink[(len(stack.sizes) * per_part, n_sums, n_tiles)](
        x, x.stride(0), stack.a, stack.a.stride(0), stack.ranks, stack.ranks.stride(0), tiles.order, tiles.tiles,
        x if norm is None else norm[0], inner, squares, k, step, PER_PART=per_part, SLICES=SLICES, SLICE=SLICE,
        num_warps=SLICES, num_stages=1, **same,
    )  # fmt: skip
    n_blocks = len(stack.blocks) if activated is None else len(stack.blocks) // 2
    _expand[(n_blocks, n_tiles)](
        y, y.stride(0), y if activated is None else activated, stack.sizes[0], stack.b, stack.b.stride(0), stack.ranks,
        stack.ranks.stride(0), tiles.order, tiles.tiles, stack.blocks, inner, squares, 1.0 / k,
        0.0 if norm is None else norm[1], ACTIVATES=activated is not None,
        EVEN=all(size % 8 == 0 for size in stack.sizes), MANY=tile_of(len(tiles.order)) > TILE,
        BLOCK_OUT=BLOCK_OUT, num_warps=EXPAND_WARPS, num_stages=1, maxnreg=_registers(stack), **same,
    )  # fmt: skip


def part_inputs(k: int) -> int:
    """Inputs in each part of a sum over k."""
    n_parts = max(1, min(MOST_PARTS, k // PART_IN))
    return -(-k // (n_parts * SLICES * SLICE)) * SLICES * SLICE


def _registers(stack: Stack) -> int | None:
    return MAX_REGISTERS if stack.most <= BLOCK_RANK and stack.b.element_size() == 2 else None


@triton.jit  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x, x_row, a, a_place, ranks, ranks_place, order, tiles, weight, inner, squares, k, step, PER_PART: tl.constexpr,
    N_SUMS: tl.constexpr, MOST: tl.constexpr, N_PARTS: tl.constexpr, HAS_NORM: tl.constexpr, DEPENDENT: tl.constexpr,
    TILE: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Products in slices x rows x ranks; A of the next is asked for before one is computed."""
    column, part_of_sum, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = tl.load(tiles + tile * 3).to(tl.int64)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    part, start = column // PER_PART, (column % PER_PART) * BLOCK_RANK
    has = (count > 0) & (place >= 0)
    rank = tl.load(ranks + place * ranks_place + part, mask=has, other=0)
    begin, end = part_of_sum * step, tl.minimum((part_of_sum + 1) * step, k)
    columns = start + tl.arange(0, BLOCK_RANK)
    taken = columns[None, :, None] < rank
    lines = a + place * a_place + (part * MOST + columns[None, :, None]).to(tl.int64) * k
    ahead = tl.arange(0, SLICES)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, None, :]
    matrix = tl.load(lines + begin + ahead, mask=taken & (begin + ahead < k), other=0.0)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    wanted = tl.where((column == 0) & has, tl.maximum(rank, 1), rank) if HAS_NORM else rank  # the first for squares too
    last = tl.where(start < wanted, first + count, first)
    for row in range(first, last, TILE):
        at = row + tl.arange(0, TILE)
        live = at < last
        rows = tl.load(order + at, mask=live, other=0).to(tl.int64)
        total = tl.zeros((SLICES, TILE, BLOCK_RANK), tl.float32)
        square = tl.zeros((SLICES, TILE), tl.float32)
        for i in range(begin, end, SLICES * SLICE):
            there = i + ahead < k
            numbers = tl.load(x + rows[None, :, None] * x_row + i + ahead, mask=live[None, :, None] & there, other=0.0)
            now, then = matrix, i + SLICES * SLICE
            then = tl.where(then < end, then, tl.where(row + TILE < last, begin, k))
            matrix = tl.load(lines + then + ahead, mask=taken & (then + ahead < k), other=0.0)
            if HAS_NORM:
                wide = numbers.to(tl.float32)
                square += tl.sum(wide * wide, 2)
                factor = tl.load(weight + i + ahead, mask=there, other=0.0).to(tl.float32)
                numbers = (wide * factor).to(x.dtype.element_ty)
            total += tl.dot(numbers, tl.trans(now, (0, 2, 1)), input_precision="ieee")
        to = at.to(tl.int64) * N_SUMS + part_of_sum
        target = inner + to[:, None] * (N_PARTS * MOST) + part * MOST + columns[None, :]
        tl.store(target, tl.sum(total, 0), mask=live[:, None] & (columns[None, :] < rank))
        if HAS_NORM:
            tl.store(squares + to, tl.sum(square, 0), mask=at < tl.where(column == 0, last, first))


@triton.jit(do_not_specialize=["share", "eps"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    y, y_row, activated, half, b, b_place, ranks, ranks_place, order, tiles, blocks, inner, squares, share, eps,
    N_SUMS: tl.constexpr, MOST: tl.constexpr, N_PARTS: tl.constexpr, HAS_NORM: tl.constexpr, ACTIVATES: tl.constexpr,
    EVEN: tl.constexpr, MANY: tl.constexpr, DEPENDENT: tl.constexpr, TILE: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Adds to a block of y. ACTIVATES: to one of gates and the ups, `half` columns further, and stores what they make,
    of rows without an adapter too. y of the next rows is asked for before some are computed. EVEN: parts begin where 16
    bytes do. MANY: a tile may have more than `TILE` rows."""
    block, tile = tl.program_id(0), tl.program_id(1)
    place = tl.load(tiles + tile * 3).to(tl.int64)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    part, begin, end = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    has = (count > 0) & (place >= 0)
    rank = tl.load(ranks + place * ranks_place + part, mask=has, other=0)
    if EVEN:
        begin, end = tl.multiple_of(begin, 8), tl.multiple_of(end, 8)
    columns = begin + tl.arange(0, BLOCK_OUT)
    there = columns < end
    lines = b + place * b_place + columns[:, None].to(tl.int64) * MOST
    matrix = _columns_of_b(lines, columns < tl.where(has, end, begin), 0, MOST, BLOCK_RANK)
    last = first + count
    summed = tl.where(has, last, first)
    if ACTIVATES:
        up_rank = tl.load(ranks + place * ranks_place + 1, mask=has, other=0)
        up_lines = lines + tl.cast(half, tl.int64) * MOST
        up_matrix = _columns_of_b(up_lines, columns < tl.where(has, end, begin), 0, MOST, BLOCK_RANK)
    else:
        last = tl.where(rank > 0, last, first)
    at = first + tl.arange(0, TILE)
    rows = tl.load(order + at, mask=at < last, other=0).to(tl.int64)
    mask = (at < last)[:, None] & there[None, :]
    places = y + rows[:, None] * y_row + columns[None, :]
    before = tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
    if ACTIVATES:
        up_before = tl.load(places + half, mask=mask, other=0.0, cache_modifier=".cg")
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    for row in range(first, last, TILE):
        at = row + tl.arange(0, TILE)
        to, target = activated + rows[:, None] * half + columns[None, :], places
        live, stored = at < last, mask
        found = before
        if ACTIVATES:
            up_found = up_before
        if MANY:
            rows = tl.load(order + at + TILE, mask=at + TILE < last, other=0).to(tl.int64)
            mask = (at + TILE < last)[:, None] & there[None, :]
            places = y + rows[:, None] * y_row + columns[None, :]
            before = tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
            if ACTIVATES:
                up_before = tl.load(places + half, mask=mask, other=0.0, cache_modifier=".cg")
        factor = tl.full((TILE,), 1.0, tl.float32)
        if HAS_NORM:
            square = tl.zeros((TILE,), tl.float32)
            for i in tl.static_range(N_SUMS):
                square += tl.load(squares + at * N_SUMS + i, mask=at < summed, other=0.0, cache_modifier=".cg")
            factor = 1.0 / tl.sqrt(square * share + eps)
        small = inner + at.to(tl.int64)[:, None] * (N_SUMS * N_PARTS * MOST) + part * MOST
        value = _added(
            found, matrix, lines, there, rank, small, live, factor, N_SUMS, N_PARTS, MOST, TILE, BLOCK_OUT,
            BLOCK_RANK,
        )  # fmt: skip
        if ACTIVATES:
            up = _added(
                up_found, up_matrix, up_lines, there, up_rank, small + MOST, live, factor, N_SUMS, N_PARTS, MOST,
                TILE, BLOCK_OUT, BLOCK_RANK,
            )  # fmt: skip
            tl.store(to, swiglu(value, up, y.dtype.element_ty), mask=stored)
        else:
            tl.store(target, value.to(y.dtype.element_ty), mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def _columns_of_b(lines, there, start, rank, BLOCK_RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    ranked = start + tl.arange(0, BLOCK_RANK)
    return tl.load(lines + ranked[None, :], mask=there[:, None] & (ranked[None, :] < rank), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    before, matrix, lines, there, rank, inner, live, factor, N_SUMS: tl.constexpr, N_PARTS: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Rounded to the type of `before`, as float32; without a rank exactly that. matrix: the first ranks of B."""
    total = tl.zeros((TILE, BLOCK_OUT), tl.float32)
    for start in range(0, rank if MOST > BLOCK_RANK else BLOCK_RANK, BLOCK_RANK):
        ranked = start + tl.arange(0, BLOCK_RANK)
        mask = live[:, None] & (ranked[None, :] < rank)
        small = tl.zeros((TILE, BLOCK_RANK), tl.float32)
        for i in tl.static_range(N_SUMS):
            place = inner + ranked[None, :] + i * N_PARTS * MOST
            small += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
        small = (small * factor[:, None]).to(matrix.dtype)
        total += tl.dot(small, tl.trans(matrix), input_precision="ieee")
        if MOST > BLOCK_RANK:
            then = tl.where(start + BLOCK_RANK < rank, start + BLOCK_RANK, 0)
            matrix = _columns_of_b(lines, there, then, rank, BLOCK_RANK)
    value = before.to(tl.float32)
    return tl.where(rank > 0, (value + total).to(before.dtype).to(tl.float32), value)
