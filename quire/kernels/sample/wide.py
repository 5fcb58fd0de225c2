"""Rows that may keep more logits than one program can list, in Triton: one pass, with a program for each span.

`guessed` brackets the smallest logit that is kept, by what a sample of the row says; `collect` weighs what lies above
the bracket and lists what lies in it. A guess that was wrong, or holds more than ROOM, is seen by who reads the list.
Invariant: what is found of a row does not depend on other rows; the list's order does, and must not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.sample.floors import float_of, key_of, weights_of

DONE = tl.constexpr(0)
KNOWN = tl.constexpr(1)
COUNT = tl.constexpr(2)
MASS = tl.constexpr(3)
"""Kinds of rows: the token is chosen; the floor is known; so many logits are kept; a share of the weight is."""
N_MARKS = tl.constexpr(4)
"""The largest logit, what is below all that may be kept, and the bracket: its lower end may be the floor, its upper end
is above it."""
N_SAMPLES = tl.constexpr(8192)
"""Logits that a guess is made from."""
SPAN = tl.constexpr(4096)
"""Columns of a program of `collect`."""
CELL = tl.constexpr(8)
"""Of them side by side, as a thread reads them, so that most of the counting stays within threads. Of any type, so that
sums are the same."""


@triton.jit
def _crossing(x, weights, peak, target):  # type: ignore[no-untyped-def]
    """(t, u): the logits >= t weigh the target at least, those >= u do not. Neighbours, in steps of 2^-11 of their
    distance from the peak; t is -inf if all weigh less."""
    lower = tl.full((), 0, tl.int32)
    upper = tl.full((), 0x7F800, tl.int32)
    while upper - lower > 1:
        middle = (lower + upper) >> 1
        t = peak - (middle << 12).to(tl.float32, bitcast=True)
        is_enough = tl.sum(tl.where(x >= t, weights, 0.0), 0) >= target
        upper = tl.where(is_enough, middle, upper)
        lower = tl.where(is_enough, lower, middle)
    above = tl.where(lower == 0, float_of(key_of(peak) + 1), peak - (lower << 12).to(tl.float32, bitcast=True))
    return peak - (upper << 12).to(tl.float32, bitcast=True), above


@triton.jit
def guessed(start, width, floor, low, base, of_weights, target, share, whole):  # type: ignore[no-untyped-def]
    """(lower, upper): logits between which the weight of a row, summed from the top, should reach the target.

    Four standard errors around what a sample says; of weights it wants the share, of counts (of_weights 0) the target
    itself. floor: below all that may be kept; low: a floor of what is sought, which is certain. whole: the weight of
    the row, which is known exactly: so what lies below the target may be estimated in place of what lies above, and
    the many small weights there vary less.
    """
    at = (tl.arange(0, N_SAMPLES).to(tl.int64) * width // N_SAMPLES).to(tl.int32)
    x = tl.load(start + at).to(tl.float32)
    all_weights = weights_of(x, base, of_weights, float("-inf"))
    weights = tl.where(x >= floor, all_weights, 0.0)
    total, whole = tl.sum(weights, 0), (whole / width * N_SAMPLES).to(tl.float32)
    wanted = tl.minimum(tl.where(of_weights == 0, target / width * N_SAMPLES, share * total), total).to(tl.float32)
    error = tl.sqrt(wanted * (total - wanted) * tl.sum(weights * weights, 0)) / tl.maximum(total, 1e-30)
    if of_weights > 0:
        below_floor = tl.sum(all_weights - weights, 0)
        from_below = total + below_floor - whole + (share * (whole - below_floor)).to(tl.float32)
        near, _ = _crossing(x, weights, base, from_below)
        error_below = tl.sqrt(tl.sum(tl.where(x < near, all_weights * all_weights, 0.0), 0))
        wanted = tl.where(error_below < error, from_below, wanted)
        error = tl.minimum(error, error_below)
    _, upper = _crossing(x, weights, base, wanted - 4 * error)
    lower, _ = _crossing(x, weights, base, wanted + 4 * error)
    lower = tl.maximum(tl.maximum(lower, low), floor)
    return lower, tl.maximum(upper, lower)


@triton.jit(do_not_specialize=["line", "n_spans"], do_not_specialize_on_alignment=["controls", "n_listed"])  # type: ignore[untyped-decorator]
def collect(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, n_spans, kinds, marks, sums, n_listed, values, columns, floats, more,
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr, ROOM: tl.constexpr, LEAST_SLOPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of each group of a span of a wide row: the weight of what is kept for certain, and 0 into `more`. Of the span:
    the weight (COUNT: the number) above the bracket, and the weight of all that may be kept, into `sums`
    [2, n_spans]. Logits in the bracket go into `values` and `columns` [ROOM], in any order. n_listed: how many of the
    row, 0 before the first span.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind = tl.load(kinds + row)
    if kind > DONE:
        marks += row * N_MARKS
        base, floor, lower, upper = tl.load(marks), tl.load(marks + 1), tl.load(marks + 2), tl.load(marks + 3)
        slope = tl.maximum(tl.load(controls + line + row).to(tl.float32), LEAST_SLOPE)
        cell = span * (SPAN // CELL) + tl.arange(0, SPAN // CELL)
        column = cell[:, None] * CELL + tl.arange(0, CELL)[None, :]
        x = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
        weights = weights_of(x, base, slope, floor)
        certain = tl.sum(tl.where(x >= upper, weights, 0.0), 1)
        group = span * (SPAN // GROUP) + tl.arange(0, SPAN // GROUP)
        is_group = group * GROUP < width
        of_groups = tl.sum(tl.reshape(certain, [SPAN // GROUP, GROUP // CELL]), 1)
        tl.store(floats + row * (2 * N_GROUPS) + N_GROUPS + group, of_groups, mask=is_group)
        tl.store(more + row * N_GROUPS + group, tl.zeros([SPAN // GROUP], tl.int64), mask=is_group)
        if kind >= COUNT:
            n_above = tl.sum(((x >= upper) & (x > float("-inf"))).to(tl.float32), 1)
            above = tl.where(kind == COUNT, n_above, certain)
            sums += row * (2 * n_spans) + span
            tl.store(sums, tl.sum(above, 0))
            tl.store(sums + n_spans, tl.sum(tl.sum(weights, 1), 0))
            is_in = ((x >= lower) & (x < upper) & (x > float("-inf"))).to(tl.int32)
            n_in = tl.sum(is_in, 1)
            first = tl.atomic_add(n_listed + row, tl.sum(n_in, 0), sem="relaxed")
            place = (first + tl.cumsum(n_in, 0) - n_in)[:, None] + tl.cumsum(is_in, 1) - 1
            tl.store(values + row * ROOM + place, x, mask=(is_in > 0) & (place < ROOM))
            tl.store(columns + row * ROOM + place, column, mask=(is_in > 0) & (place < ROOM))
