"""The smallest logit that a truncated row keeps, found by one program, in Triton.

Owns the search, from cheap to general: the largest logits of the groups bound it from below; the logits above the
bound are collected; few of them are ranked against each other, more are searched by bisection of their ordered bits;
where they do not fit, the whole row is narrowed down first. Invariant: all ways are exact up to the rounding of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

FEW = tl.constexpr(256)
"""Logits that are ranked against each other."""
STEP = tl.constexpr(32)
"""Of so many at a time."""
N_SAMPLES = tl.constexpr(2048)
"""Logits that a first guess is made from."""
LIST_TILE = tl.constexpr(1024)
ROW_TILE = tl.constexpr(4096)
"""Logits read at once from a list and from a row."""


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
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """(logits, how many, floor): those that include all kept ones, collected in `values` or the row itself.

    peaks, shares: largest logit and weight of each group of the row at `start`, base the largest of all. Scratch:
    found int32 [groups]; values and columns [min(ROOM, width)], the logits collected, in the row's dtype, and where
    they stand.
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
        low = tl.maximum(floor, _bound(peaks, least, sums, base, slope, target, GROUP))
    n_found = _list_groups(peaks, low, found, N_GROUPS)
    n = _collect(start, width, found, n_found, low, float("inf"), values, columns, GROUP, ROOM)
    entries = values
    if n <= FEW:
        floor = _rank(values, n, base, slope, k, top_p, whole)
    else:
        if n > ROOM:
            entries, n = start, n * 0 + width
        for is_nucleus in range(2):
            if tl.where(is_nucleus == 0, k > 0, top_p < 1):
                target, of_weights = k, slope * 0
                if is_nucleus > 0:
                    if whole < 0:
                        whole = _mass(entries, n, floor, base, slope, ROW_TILE)
                    target, of_weights = top_p * whole, slope
                if n > ROOM:
                    floor = _search_row(
                        start, width, peaks, floor, base, of_weights, target, top_p, found, columns, values,
                        GROUP, N_GROUPS, ROOM,
                    )  # fmt: skip
                else:
                    floor = _largest_with(values, n, base, of_weights, tl.maximum(floor, low), base, target)
    return entries, n, floor


@triton.jit
def _key_of(x):  # type: ignore[no-untyped-def]
    """An int64 that orders like the float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_of(key):  # type: ignore[no-untyped-def]
    """The float32 of a `_key_of`."""
    bits = key.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _at_least(x):  # type: ignore[no-untyped-def]
    """The smallest float32 that is >= the float64 x."""
    near = x.to(tl.float32)
    return tl.where(near.to(tl.float64) < x, _float_of(_key_of(near) + 1), near)


@triton.jit  # type: ignore[untyped-decorator]
def _bound(values, least, sums, peak, slope, target, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _collect(  # type: ignore[no-untyped-def]
    start, width, found, n_found, low, high, values, columns, GROUP: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """Copy the logits in [low, high) of the groups listed, in vocabulary order; returns how many, or more than ROOM."""
    rows = tl.arange(0, ROW_TILE // GROUP)
    at = n_found * 0
    n = n_found * 0
    while (at < n_found) & (n <= ROOM):
        is_listed = at + rows < n_found
        group = tl.load(found + at + rows, mask=is_listed, other=0)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        # single words: wider loads would have to be exchanged between threads before the scattered stores
        column = tl.max_contiguous(column, [1, 1])
        x = tl.load(start + column, mask=is_listed[:, None] & (column < width), other=float("-inf")).to(tl.float32)
        is_in = ((x >= low) & (x < high) & (x > float("-inf"))).to(tl.int32)
        counts = tl.sum(is_in, 1)
        places = n + (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(is_in, 1) - 1
        kept = (is_in > 0) & (places < ROOM)
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


@triton.jit  # type: ignore[untyped-decorator]
def _mass(start, n, floor, base, slope, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight of the logits >= floor among n, float64."""
    lanes = tl.arange(0, TILE)
    masses = tl.zeros([TILE], tl.float32)
    for at in range(0, n, TILE):
        x = tl.load(start + at + lanes, mask=at + lanes < n, other=float("-inf")).to(tl.float32)
        masses += weights_of(x, base, slope, floor)
    return tl.sum(masses.to(tl.float64), 0)


@triton.jit
def _largest_with(start, n, base, slope, low, high, target):  # type: ignore[no-untyped-def]
    """The largest t in [low, high] such that the logits >= t among n weigh target at least; low if there is none."""
    lower, upper = _key_of(low), _key_of(high)
    while lower < upper:
        middle = lower + ((upper - lower + 1) >> 1)
        is_enough = _mass(start, n, _float_of(middle), base, slope, LIST_TILE) >= target
        lower = tl.where(is_enough, middle, lower)
        upper = tl.where(is_enough, upper, middle - 1)
    return _float_of(lower)


@triton.jit
def _measure(start, width, base, slope, a, b, c):  # type: ignore[no-untyped-def]
    """Weights and counts of the logits that are >= a, >= b and >= c in a row."""
    LANES: tl.constexpr = ROW_TILE // 4
    within = (
        tl.arange(0, 4)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    )  # sums over the first axis stay in a thread
    mass_a = tl.zeros([LANES], tl.float32)
    mass_b, mass_c, n_a, n_b, n_c = mass_a, mass_a, mass_a, mass_a, mass_a
    for at in range(0, width, ROW_TILE):
        x = tl.load(start + at + within, mask=at + within < width, other=float("-inf")).to(tl.float32)
        weights = weights_of(x, base, slope, a)
        mass_a += tl.sum(weights, 0)
        mass_b += tl.sum(tl.where(x >= b, weights, 0.0), 0)
        mass_c += tl.sum(tl.where(x >= c, weights, 0.0), 0)
        n_a += tl.sum((x >= a).to(tl.float32), 0)
        n_b += tl.sum((x >= b).to(tl.float32), 0)
        n_c += tl.sum((x >= c).to(tl.float32), 0)
    mass_a, mass_b, mass_c = mass_a.to(tl.float64), mass_b.to(tl.float64), mass_c.to(tl.float64)
    return tl.sum(mass_a, 0), tl.sum(mass_b, 0), tl.sum(mass_c, 0), tl.sum(n_a, 0), tl.sum(n_b, 0), tl.sum(n_c, 0)


@triton.jit
def _guess(start, width, floor, base, slope, target, share):  # type: ignore[no-untyped-def]
    """Two logits between which the weight of a row, summed from the top, should reach the target.

    Four standard errors around what a sample says; of weights it wants the share, of counts the target itself.
    """
    x = tl.load(start + tl.arange(0, N_SAMPLES) * (width // N_SAMPLES)).to(tl.float32)
    weights = weights_of(x, base, slope, floor)
    total = tl.sum(weights, 0)
    wanted = tl.minimum(tl.where(slope == 0, target / width * N_SAMPLES, share * total), total).to(tl.float32)
    error = 4.0 * tl.sqrt(wanted * (total - wanted) * tl.sum(weights * weights, 0)) / tl.maximum(total, 1e-30)
    nothing = tl.zeros([N_SAMPLES], tl.float32)
    a = _bound(x, weights, nothing, base, slope, wanted + error, 1)
    c = _bound(x, weights, nothing, base, slope, wanted - error, 1)
    return tl.maximum(a, floor), tl.maximum(c, floor)


@triton.jit  # type: ignore[untyped-decorator]
def _search_row(  # type: ignore[no-untyped-def]
    start, width, peaks, floor, base, slope, target, share, found, columns, values,
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """`_largest_with` for a whole row: passes that each cut the range in four, until what is left can be collected.

    The first cut is a guess from a sample. Later ones are even in the logits, and from the seventh on even in the
    ordered bits, which ends for any values.
    """
    a, c = _guess(start, width, floor, base, slope, target, share)
    b = tl.where(a > float("-inf"), 0.5 * a + 0.5 * c, c)
    lower, upper = floor, _float_of(_key_of(base) + 1)
    above, n_upper = target * 0, slope * 0
    n_lower = n_upper + width
    turn = 0
    while (n_lower - n_upper > ROOM) & (_key_of(upper) - _key_of(lower) > 1):
        mass_a, mass_b, mass_c, n_a, n_b, n_c = _measure(start, width, base, slope, a, b, c)
        # the highest cut that has enough above it, and the one after it
        if mass_c >= target:
            lower, n_lower = c, n_c
        elif mass_b >= target:
            lower, n_lower, upper, n_upper, above = b, n_b, c, n_c, mass_c
        elif mass_a >= target:
            lower, n_lower, upper, n_upper, above = a, n_a, b, n_b, mass_b
        else:
            upper, n_upper, above = a, n_a, mass_a
        turn += 1
        low_key, n_keys = _key_of(lower), _key_of(upper) - _key_of(lower)
        is_even = (turn < 7) & (lower > float("-inf"))
        a = tl.where(is_even, 0.75 * lower + 0.25 * upper, _float_of(low_key + (n_keys >> 2)))
        b = tl.where(is_even, 0.5 * lower + 0.5 * upper, _float_of(low_key + (n_keys >> 1)))
        c = tl.where(is_even, 0.25 * lower + 0.75 * upper, _float_of(low_key + n_keys - (n_keys >> 2)))
    if _key_of(upper) - _key_of(lower) > 1:
        n_found = _list_groups(peaks, lower, found, N_GROUPS)
        n = _collect(start, width, found, n_found, lower, upper, values, columns, GROUP, ROOM)
        lower = _largest_with(values, n, base, slope, lower, upper, target - above)
    return lower
