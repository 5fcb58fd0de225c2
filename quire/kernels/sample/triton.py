"""Sampling on CUDA. Logits are read once, in chunks; only the chunk that holds the chosen token is read again.

Kernels: `_floors` (truncated rows only) finds the smallest logit that a row keeps; `_chunk_stats` reduces each chunk;
`_select` inverts the cumulative distribution over chunks, then inside one. Invariant: a row's token is the same,
bit for bit, in any batch and run: chunk sizes are fixed, nothing is atomic, no kernel is compiled for a row count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.sample.draw import EMPTY, FINE, NON_FINITE, Choice

CHUNK = 4096
N_PIVOTS = 8


def choose_by(logits: torch.Tensor, controls: torch.Tensor, out: Choice) -> None:
    """See `op.choose_by`."""
    n_rows, width = logits.shape
    n_chunks = triton.cdiv(width, CHUNK)
    floors = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    stats = torch.empty((2, n_rows, n_chunks), dtype=torch.float32, device=logits.device)
    first = torch.empty((n_rows, n_chunks), dtype=torch.int32, device=logits.device)
    line = controls.stride(0)
    _floors[(n_rows,)](
        logits, logits.stride(0), width, controls, line, floors, CHUNK=CHUNK, N_PIVOTS=N_PIVOTS, num_warps=16
    )  # fmt: skip
    _chunk_stats[(n_rows, n_chunks)](
        logits, logits.stride(0), width, controls, line, floors, stats, first, n_rows, n_chunks, CHUNK=CHUNK,
        num_warps=8,
    )  # fmt: skip
    _select[(n_rows,)](
        logits, logits.stride(0), width, controls, line, floors, stats, first, n_rows, n_chunks, out.token_ids,
        out.status, CHUNK=CHUNK, N_CHUNKS=triton.next_power_of_2(n_chunks), FINE=FINE, NON_FINITE=NON_FINITE,
        EMPTY=EMPTY, num_warps=8,
    )  # fmt: skip


@triton.jit
def _weights(x, peak, inverse, floor):
    """exp((x - peak) / temperature) of the logits that are kept; 0 for the others and for -inf."""
    return tl.where((x >= floor) & (x > float("-inf")), tl.exp((x - peak) * inverse), 0.0)


@triton.jit(do_not_specialize=["n_rows"])
def _chunk_stats(
    logits, stride, width, controls, line, floors, stats, first, n_rows, n_chunks, CHUNK: tl.constexpr
):  # fmt: skip
    """Of one chunk of one row: the largest logit (+inf if there is a NaN), its first column, and the sum of weights."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < width, other=float("-inf"))
    peak = tl.max(x, 0)
    at = tl.min(tl.where(x == peak, columns, 2147483647), 0)
    n_nan = tl.sum((x != x).to(tl.int32), 0)
    inverse = tl.load(controls + line + row).to(tl.float32)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(_weights(x, base, inverse, tl.load(floors + row)), 0)
    cell = row * n_chunks + chunk
    tl.store(stats + cell, tl.where(n_nan > 0, float("inf"), peak))
    tl.store(stats + n_rows * n_chunks + cell, total)
    tl.store(first + cell, at)


@triton.jit
def _first_above(weights, target, index, NOWHERE: tl.constexpr):
    """(first index where the cumulative weight exceeds target, the cumulative weight before it), in float64.

    A target that rounding put at the total or beyond finds the last index with any weight; NOWHERE if there is none.
    """
    cumulative = tl.cumsum(weights.to(tl.float64), 0)
    above = tl.min(tl.where((cumulative > target) & (weights > 0), index, NOWHERE), 0)
    last = tl.max(tl.where(weights > 0, index, -1), 0)
    found = tl.where(above == NOWHERE, tl.where(last < 0, NOWHERE, last), above)
    before = tl.sum(tl.where(index == found - 1, cumulative, 0.0), 0)
    return found, before


@triton.jit(do_not_specialize=["n_rows"])
def _select(
    logits, stride, width, controls, line, floors, stats, first, n_rows, n_chunks, token_ids, status,
    CHUNK: tl.constexpr, N_CHUNKS: tl.constexpr, FINE: tl.constexpr, NON_FINITE: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """The token and status of one row."""
    row = tl.program_id(0)
    inverse = tl.load(controls + line + row).to(tl.float32)
    uniform = tl.load(controls + row)
    floor = tl.load(floors + row)
    chunks = tl.arange(0, N_CHUNKS)
    cells = row * n_chunks + chunks
    peaks = tl.load(stats + cells, mask=chunks < n_chunks, other=float("-inf"))
    sums = tl.load(stats + n_rows * n_chunks + cells, mask=chunks < n_chunks, other=0.0)
    peak = tl.max(peaks, 0)
    bad = tl.where(peak == float("inf"), NON_FINITE, tl.where(peak == float("-inf"), EMPTY, FINE))
    base = tl.where(bad == FINE, peak, 0.0)

    # greedy: the first chunk that has the peak; random: the chunk in which the cumulative sum passes its target
    greedy_chunk = tl.min(tl.where(peaks == peak, chunks, N_CHUNKS), 0)
    shares = tl.where(peaks > float("-inf"), sums * tl.exp((peaks - base) * inverse), 0.0)
    shares = tl.where(bad == FINE, shares, 0.0)
    target = uniform * tl.sum(shares.to(tl.float64), 0)
    random_chunk, before = _first_above(shares, target, chunks, N_CHUNKS)
    chunk = tl.minimum(tl.where(inverse == 0.0, greedy_chunk, random_chunk), n_chunks - 1)
    largest = tl.load(first + row * n_chunks + chunk)

    within = tl.arange(0, CHUNK)
    columns = chunk * CHUNK + within
    x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < width, other=float("-inf"))
    found, _ = _first_above(_weights(x, base, inverse, floor), target - before, within, CHUNK)
    drawn = tl.where(found == CHUNK, largest, chunk * CHUNK + found)
    token = tl.where(inverse == 0.0, largest, drawn)
    tl.store(token_ids + row, tl.where(bad == FINE, token, 0))
    tl.store(status + row, bad.to(tl.uint8))


@triton.jit
def _key_of(x):
    """An int32 that orders like the float32 x; its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    bits = key.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mass_above(start, width, peak, inverse, pivots, CHUNK: tl.constexpr, N_PIVOTS: tl.constexpr):
    """float32 [N_PIVOTS]: the weight of all logits of the row at `start` that are >= each pivot."""
    masses = tl.zeros([CHUNK, N_PIVOTS], tl.float32)
    for at in range(0, width, CHUNK):
        columns = at + tl.arange(0, CHUNK)
        x = tl.load(start + columns, mask=columns < width, other=float("-inf"))
        weights = _weights(x, peak, inverse, float("-inf"))
        masses += tl.where(x[:, None] >= pivots[None, :], weights[:, None], 0.0)
    return tl.sum(masses, 0)


@triton.jit
def _largest_with(start, width, peak, inverse, low, target, CHUNK: tl.constexpr, N_PIVOTS: tl.constexpr):
    """The largest t >= low such that the weight of x >= t is at least target; low if there is none.

    Searches the ordered integers of float32, cutting the range into N_PIVOTS parts a pass: 11 passes at most for 8.
    """
    lower = _key_of(low).to(tl.int64)
    upper = _key_of(peak).to(tl.int64)
    parts = tl.arange(0, N_PIVOTS) + 1
    while lower < upper:
        pivots = _float_of(lower + (upper - lower) * parts // N_PIVOTS)
        masses = _mass_above(start, width, peak, inverse, pivots, CHUNK, N_PIVOTS)
        n_enough = tl.sum((masses >= target).to(tl.int32), 0)
        length = upper - lower
        upper = tl.where(n_enough == N_PIVOTS, upper, lower + length * (n_enough + 1) // N_PIVOTS - 1)
        lower = lower + length * n_enough // N_PIVOTS
    return _float_of(lower)


@triton.jit
def _floors(
    logits, stride, width, controls, line, floors, CHUNK: tl.constexpr, N_PIVOTS: tl.constexpr
):  # fmt: skip
    """The smallest logit that one row keeps; -inf where nothing is cut."""
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(controls + line + row).to(tl.float32)
    drop = tl.load(controls + 2 * line + row).to(tl.float32)
    top_k = tl.load(controls + 3 * line + row).to(tl.float32)
    top_p = tl.load(controls + 4 * line + row).to(tl.float32)
    tl.store(floors + row, float("-inf"))
    if (drop == float("-inf")) & (top_k == 0) & (top_p >= 1):
        return
    start = logits + row * stride
    peaks = tl.full([CHUNK], float("-inf"), tl.float32)
    for at in range(0, width, CHUNK):
        columns = at + tl.arange(0, CHUNK)
        peaks = tl.maximum(peaks, tl.load(start + columns, mask=columns < width, other=float("-inf")))
    peak = tl.max(peaks, 0)
    floor = peak + drop
    if top_k > 0:
        # with 1 / temperature = 0 every logit weighs 1, so this is the k-th largest
        zero = top_k * 0.0
        kth = _largest_with(start, width, peak, zero, zero - float("inf"), top_k, CHUNK, N_PIVOTS)
        floor = tl.maximum(floor, kth)
    if top_p < 1:
        pivots = tl.zeros([N_PIVOTS], tl.float32) + floor
        kept = tl.max(_mass_above(start, width, peak, inverse, pivots, CHUNK, N_PIVOTS), 0)
        floor = _largest_with(start, width, peak, inverse, floor, top_p * kept, CHUNK, N_PIVOTS)
    tl.store(floors + row, floor)
