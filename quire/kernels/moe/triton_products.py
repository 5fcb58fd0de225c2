"""The products of `triton`. Sums are in float32; a program has one block of assignments of one expert.

Owns how a tile of a matrix is read, whatever it is kept as (`Codes`). Does not own codes of 4 bits (`nibbles_triton`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import nibbles_triton as nibbles

PLAIN, BYTES, E4M3, INT4, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
"""E4M3: rows are in e4m3, too."""
SIDE = tl.constexpr(128)
"""Of a block of bytes with one scale."""


@triton.jit  # type: ignore[untyped-decorator]
def _columns(KEPT: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BK]: which columns of BK the places of a tile are."""
    if KEPT >= INT4:
        at = nibbles.columns()
    else:
        at = tl.arange(0, BK)
    return at


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    sums, a, a_scales, matrix, scales, row, is_row, start,
    COLUMNS: tl.constexpr, KEPT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """sums [BM, BN] + a [BM, BK] times the columns start .. of the rows `row` of a matrix. Scales of whole rows are
    left out. a_scales: [BM], E4M3 in blocks."""
    if KEPT >= INT4:
        LINES: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP * (2 if ZEROS else 1)
        w = nibbles.numbers(matrix, scales, row, is_row, start, 1, LINES, COLUMNS, GROUP, ZEROS, KEPT == FP4, BN)
        sums = tl.dot(a, tl.trans(w).to(a.dtype), sums, input_precision="ieee")
    else:
        k = start + tl.arange(0, BK)
        at = matrix + row.to(tl.int64)[None, :] * COLUMNS + k[:, None]
        w = tl.load(at, mask=is_row[None, :] & (k < COLUMNS)[:, None], other=0.0).to(a.dtype)
        if GROUP > 0:
            at = scales + row // SIDE * ((COLUMNS + SIDE - 1) // SIDE) + start // SIDE
            own = tl.load(at, mask=is_row, other=0.0)[None, :]
            if KEPT == E4M3:
                own = own * a_scales[:, None]
            sums += tl.dot(a, w, input_precision="ieee") * own
        elif KEPT == E4M3:
            sums = tl.dot(a, w, sums, max_num_imprecise_acc=BK)
        else:
            sums = tl.dot(a, w, sums, input_precision="ieee")
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _finished(  # type: ignore[no-untyped-def]
    sums, a_scales, scales, factors, biases, row, is_row, KEPT: tl.constexpr, GROUP: tl.constexpr
):
    """Times the scales or factors of rows, where they have one each, and the bias. a_scales: [BM], E4M3."""
    if KEPT > PLAIN and GROUP == 0:
        own = tl.load(scales + row, mask=is_row, other=0.0)[None, :]
        if KEPT == E4M3:
            own = own * a_scales[:, None]
        sums *= own
    if factors is not None:
        sums *= nibbles.UNIT * tl.load(factors + row, mask=is_row, other=0.0)[None, :]
    if biases is not None:
        sums += tl.load(biases + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _scales_of(scales, rows, is_row, WANTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BM], those of rows in e4m3; or nothing that is used."""
    found = 0.0
    if WANTED:
        found = tl.load(scales + rows, mask=is_row, other=0.0)
    return found


@triton.jit(do_not_specialize=["n_blocks", "x_step"])  # type: ignore[untyped-decorator]
def up(  # type: ignore[no-untyped-def]
    x, x_stride, x_scales, x_step, table, n_blocks, order, matrices, scales, factors, biases, deltas, inner,
    slope, offset, limit,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, LIMITED: tl.constexpr,
    KEPT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, MATRIX: tl.constexpr, SCALES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gate and up of a block's rows for BN columns, and what is made of them, at the place of the assignment. MATRIX,
    SCALES: numbers of an expert's. deltas: what adapters add, of each assignment; what is made is in its row then."""
    N_TILES: tl.constexpr = (INNER + BN - 1) // BN
    block, tile = tl.program_id(0) // N_TILES, tl.program_id(0) % N_TILES
    n_rows = tl.load(table + 2 * n_blocks + block)
    if n_rows == 0:
        return
    expert = tl.load(table + block).to(tl.int64)
    m = tl.arange(0, BM)
    places = tl.load(table + n_blocks + block) + m
    assigned = tl.load(order + places, mask=m < n_rows, other=0)
    token = assigned // K
    column = tile * BN + tl.arange(0, BN)
    k = _columns(KEPT, BK)
    rows = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    matrix, own = matrices + expert * MATRIX, scales
    if scales is not None:
        own = scales + expert * SCALES
    is_row, is_column = m < n_rows, column < INNER
    gates, ups = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for start in range(0, HIDDEN, BK):
        a = tl.load(rows + start, mask=is_row[:, None] & (k < HIDDEN - start)[None, :], other=0.0)
        by = _scales_of(x_scales, start // SIDE * x_step + token, is_row, KEPT == E4M3 and GROUP > 0)
        gates = _added(gates, a, by, matrix, own, column, is_column, start, HIDDEN, KEPT, GROUP, ZEROS, BN, BK)
        ups = _added(ups, a, by, matrix, own, INNER + column, is_column, start, HIDDEN, KEPT, GROUP, ZEROS, BN, BK)
    bias, factor = biases, factors
    if biases is not None:
        bias = biases + expert * (2 * INNER)
    if factors is not None:
        factor = factors + expert * (2 * INNER)
    by = _scales_of(x_scales, token, is_row, KEPT == E4M3 and GROUP == 0)
    gates = _finished(gates, by, own, factor, bias, column, is_column, KEPT, GROUP)
    ups = _finished(ups, by, own, factor, bias, INNER + column, is_column, KEPT, GROUP)
    is_both = is_row[:, None] & is_column[None, :]
    if deltas is not None:
        places = assigned
        line = deltas + assigned.to(tl.int64)[:, None] * (2 * INNER) + column[None, :]
        gates += tl.load(line, mask=is_both, other=0.0).to(tl.float32)
        ups += tl.load(line + INNER, mask=is_both, other=0.0).to(tl.float32)
    if LIMITED:
        gates = tl.minimum(gates, limit)
        ups = tl.minimum(tl.maximum(ups, -limit), limit)
    made = (ups + offset) * gates / (1.0 + tl.exp(-slope * gates))
    at = inner + places.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(at, made.to(inner.dtype.element_ty), mask=is_both)


@triton.jit(do_not_specialize=["n_blocks", "inner_step"])  # type: ignore[untyped-decorator]
def down(  # type: ignore[no-untyped-def]
    inner, inner_stride, inner_scales, inner_step, table, n_blocks, order, matrices, scales, factors, biases, deltas,
    weights, each,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    KEPT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, MATRIX: tl.constexpr, SCALES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Outputs of a block's rows for BN columns, times their weights, each as the row of its assignment. deltas: see
    `up`."""
    N_TILES: tl.constexpr = (HIDDEN + BN - 1) // BN
    block, tile = tl.program_id(0) // N_TILES, tl.program_id(0) % N_TILES
    n_rows = tl.load(table + 2 * n_blocks + block)
    if n_rows == 0:
        return
    expert = tl.load(table + block).to(tl.int64)
    m = tl.arange(0, BM)
    places = tl.load(table + n_blocks + block) + m
    column = tile * BN + tl.arange(0, BN)
    is_row, is_column = m < n_rows, column < HIDDEN
    assigned = tl.load(order + places, mask=is_row, other=0)
    if deltas is not None:
        places = assigned
    k = _columns(KEPT, BK)
    rows = inner + places.to(tl.int64)[:, None] * inner_stride + k[None, :]
    matrix, own, factor, bias = matrices + expert * MATRIX, scales, factors, biases
    if scales is not None:
        own = scales + expert * SCALES
    if factors is not None:
        factor = factors + expert * HIDDEN
    if biases is not None:
        bias = biases + expert * HIDDEN
    sums = tl.zeros([BM, BN], tl.float32)
    for start in range(0, INNER, BK):
        a = tl.load(rows + start, mask=is_row[:, None] & (k < INNER - start)[None, :], other=0.0)
        by = _scales_of(inner_scales, start // SIDE * inner_step + places, is_row, KEPT == E4M3 and GROUP > 0)
        sums = _added(sums, a, by, matrix, own, column, is_column, start, INNER, KEPT, GROUP, ZEROS, BN, BK)
    by = _scales_of(inner_scales, places, is_row, KEPT == E4M3 and GROUP == 0)
    sums = _finished(sums, by, own, factor, bias, column, is_column, KEPT, GROUP)
    is_both = is_row[:, None] & is_column[None, :]
    if deltas is not None:
        line = deltas + assigned.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        sums += tl.load(line, mask=is_both, other=0.0).to(tl.float32)
    weight = tl.load(weights + assigned, mask=is_row, other=0.0)
    at = each + assigned.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(at, (sums * weight[:, None]).to(each.dtype.element_ty), mask=is_both)
