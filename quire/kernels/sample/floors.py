"""The smallest logit that a truncated row keeps, found by one program, in Triton.

Owns the search: the largest logits of the groups bound it from below; the logits above the bound are collected; few of
them are ranked against each other, more are searched by bisection of their ordered bits, which takes any values.
Does not own rows in which too many lie above the bound (`wide.py`). Invariant: all ways are exact up to the rounding of
sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

FEW = tl.constexpr(256)
"""Logits that are ranked against each other."""
STEP = tl.constexpr(32)
"""Of so many at a time."""
LIST = tl.constexpr(1024)
"""Logits that may be collected from a row."""
MOST_GROUPS = tl.constexpr(128)
"""Groups that one program looks through for them."""
ROW_TILE = tl.constexpr(4096)
"""Logits read at once."""


@triton.jit
def weights_of(x, base, slope, floor):  # type: ignore[no-untyped-def]
    """exp((x - base) * slope) of the logits that are kept, 0 for the others and for -inf; slope 0 stands for 1s."""
    weights = tl.where(slope == 0, 1.0, tl.exp((x - base) * slope))
    return tl.where((x >= floor) & (x > float("-inf")), weights, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def block_sums(start, n, base, slope, floor, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight of each BLOCK of n logits; out: float32 [ceil(n / BLOCK)], ready for all threads afterwards."""
    blocks = tl.arange(0, ROW_TILE // BLOCK)
    within = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for at in range(0, n, ROW_TILE):
        x = tl.load(start + at + within, mask=at + within < n, other=float("-inf")).to(tl.float32)
        sums = tl.sum(weights_of(x, base, slope, floor), 1)
        tl.store(out + at // BLOCK + blocks, sums, mask=at + blocks * BLOCK < n)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def floor_of(  # type: ignore[no-untyped-def]
    start, width, peaks, shares, base, slope, drop, top_k, top_p, found, columns, values,
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr,
):  # fmt: skip
    """(how many, floor, low): the logits that include all kept ones, collected in `values`. If they are more than LIST,
    or in more than MOST_GROUPS, it says more than LIST, floor is what `drop` alone leaves, and low is never above the
    floor of top_k, or else of top_p.

    peaks, shares: largest logit and weight of each group of the row at `start`, base the largest of all. Scratch:
    found int32 [groups]; values and columns [LIST], the logits collected, in the row's dtype, and where they stand.
    """
    floor = _at_least(base.to(tl.float64) + drop)
    k = tl.where(top_k < width, top_k, 0)
    # what top_p is a share of; negative: the weight of what the others leave
    whole = tl.where((k > 0) | (drop > float("-inf")), -1.0, tl.sum(shares.to(tl.float64), 0))
    low = floor
    if (k > 0) | (whole >= 0):
        # the k largest groups hold k logits of the row; for top_p, what groups weigh at least above a bound
        ones = tl.where(peaks > float("-inf"), 1.0, 0.0)
        least = tl.where(k > 0, ones, weights_of(peaks, base, slope, float("-inf")))
        sums = tl.where(k > 0, 0.0, shares)
        target = tl.where(k > 0, k, top_p * whole)
        low = tl.maximum(floor, bound(peaks, least, sums, base, slope, target, GROUP))
    n_found = _list_groups(peaks, low, found, N_GROUPS)
    n = n_found * 0 + LIST + 1
    if n_found <= MOST_GROUPS:
        n = _collect(start, width, found, n_found, low, values, columns, GROUP)
    if n <= FEW:
        floor = _rank(values, n, base, slope, k, top_p, whole)
    elif n <= LIST:
        index = tl.arange(0, LIST)
        x = tl.load(values + index, mask=index < n, other=float("-inf")).to(tl.float32)
        if k > 0:
            ones_of_list = tl.where(x > float("-inf"), 1.0, 0.0)
            floor = largest_in(x, ones_of_list, tl.maximum(floor, low), base, k)
        if top_p < 1:
            weights = weights_of(x, base, slope, floor)
            whole = tl.where(whole < 0, tl.sum(weights.to(tl.float64), 0), whole)
            floor = largest_in(x, weights, tl.maximum(floor, low), base, top_p * whole)
    return n, floor, low


@triton.jit
def key_of(x):  # type: ignore[no-untyped-def]
    """An int64 that orders like the float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def float_of(key):  # type: ignore[no-untyped-def]
    """The float32 of a `key_of`."""
    bits = key.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _at_least(x):  # type: ignore[no-untyped-def]
    """The smallest float32 that is >= the float64 x."""
    near = x.to(tl.float32)
    return tl.where(near.to(tl.float64) < x, float_of(key_of(near) + 1), near)


@triton.jit  # type: ignore[untyped-decorator]
def bound(values, least, sums, peak, slope, target, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """A t such that the logits >= t certainly weigh target, near the largest; -inf if there is none.

    values, least, sums: the largest logit of each group, its weight, and the weight of the group. Above a t that is
    not above its largest logit, a group weighs no less than `least`, nor less than its sum without GROUP - 1 logits
    just below t. Bisects the upper halves of float32 distances from the peak, 0x7F80 being infinity.
    """
    lower = tl.full((), 0, tl.int32)
    upper = tl.full((), 0x7F80, tl.int32)
    while upper - lower > 1:
        middle = (lower + upper) >> 1
        t = peak - (middle << 16).to(tl.float32, bitcast=True)
        certain = tl.maximum(least, sums - (GROUP - 1) * tl.exp((t - peak) * slope))
        is_enough = tl.sum(tl.where(values >= t, certain, 0.0), 0) >= target
        upper = tl.where(is_enough, middle, upper)
        lower = tl.where(is_enough, lower, middle)
    return peak - (upper << 16).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _list_groups(peaks, low, found, N_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the groups that have a logit >= low into `found`, in order; returns how many."""
    is_in = (peaks >= low) & (peaks > float("-inf"))
    places = tl.cumsum(is_in.to(tl.int32), 0)
    tl.debug_barrier()  # a list from before may still be read
    tl.store(found + places - 1, tl.arange(0, N_GROUPS), mask=is_in)
    tl.debug_barrier()
    return tl.max(places, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _collect(start, width, found, n_found, low, values, columns, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy the logits >= low of the groups listed, in vocabulary order; returns how many, or more than LIST."""
    rows = tl.arange(0, ROW_TILE // GROUP)
    at = n_found * 0
    n = n_found * 0
    while (at < n_found) & (n <= LIST):
        is_listed = at + rows < n_found
        group = tl.load(found + at + rows, mask=is_listed, other=0)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        # single words: wider loads would have to be exchanged between threads before the scattered stores
        column = tl.max_contiguous(column, [1, 1])
        x = tl.load(start + column, mask=is_listed[:, None] & (column < width), other=float("-inf")).to(tl.float32)
        is_in = ((x >= low) & (x > float("-inf"))).to(tl.int32)
        counts = tl.sum(is_in, 1)
        places = n + (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(is_in, 1) - 1
        kept = (is_in > 0) & (places < LIST)
        tl.store(values + places, x, mask=kept)
        tl.store(columns + places, column, mask=kept)
        n += tl.sum(counts, 0)
        at += ROW_TILE // GROUP
    tl.debug_barrier()
    return n


@triton.jit
def _rank(values, n, base, slope, k, top_p, whole):  # type: ignore[no-untyped-def]
    """The floor that top_k (0: none) and top_p leave of n <= FEW logits, by comparing each with each.

    whole: what top_p is a share of; if negative, the weight of what top_k leaves.
    """
    index = tl.arange(0, FEW)
    x = tl.load(values + index, mask=index < n, other=float("-inf")).to(tl.float32)
    n_larger = tl.zeros([FEW], tl.int32)
    larger = tl.zeros([FEW], tl.float32)
    for at in range(0, n, STEP):
        others = at + tl.arange(0, STEP)
        y = tl.load(values + others, mask=others < n, other=float("-inf")).to(tl.float32)
        weights = weights_of(y, base, slope, float("-inf"))
        is_larger = y[:, None] > x[None, :]  # a thread has one x and all y, so its sums need no other thread
        n_larger += tl.sum(is_larger.to(tl.int32), 0)
        larger += tl.sum(tl.where(is_larger, weights[:, None], 0.0), 0)
    is_kept = (index < n) & (n_larger < tl.where(k > 0, k, n.to(tl.float64)))
    total = tl.sum(tl.where(is_kept, weights_of(x, base, slope, float("-inf")), 0.0), 0)
    total = tl.where(whole >= 0, whole, total)
    is_kept = is_kept & (larger < tl.where(top_p < 1, top_p * total, float("inf")))
    return tl.min(tl.where(is_kept, x, base), 0)


@triton.jit
def mass(start, n, floor, base, slope):  # type: ignore[no-untyped-def]
    """The weight of the logits >= floor among n, float64."""
    lanes = tl.arange(0, ROW_TILE)
    masses = tl.zeros([ROW_TILE], tl.float32)
    for at in range(0, n, ROW_TILE):
        x = tl.load(start + at + lanes, mask=at + lanes < n, other=float("-inf")).to(tl.float32)
        masses += weights_of(x, base, slope, floor)
    return tl.sum(masses.to(tl.float64), 0)


@triton.jit
def largest_in(x, weights, low, high, target):  # type: ignore[no-untyped-def]
    """The largest t in [low, high] such that the logits >= t of a block weigh target at least; low if there is none."""
    lower, upper = key_of(low), key_of(high)
    while lower < upper:
        middle = lower + ((upper - lower + 1) >> 1)
        is_enough = tl.sum(tl.where(x >= float_of(middle), weights, 0.0).to(tl.float64), 0) >= target
        lower = tl.where(is_enough, middle, lower)
        upper = tl.where(is_enough, upper, middle - 1)
    return float_of(lower)


@triton.jit
def largest_of(start, n, base, slope, low, high, target):  # type: ignore[no-untyped-def]
    """The same of n logits in memory."""
    lower, upper = key_of(low), key_of(high)
    while lower < upper:
        middle = lower + ((upper - lower + 1) >> 1)
        is_enough = mass(start, n, float_of(middle), base, slope) >= target
        lower = tl.where(is_enough, middle, lower)
        upper = tl.where(is_enough, upper, middle - 1)
    return float_of(lower)
