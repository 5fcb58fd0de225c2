"""Rows that may keep thousands of logits, with several programs a row, in Triton: where the smallest kept one lies.

`measure` weighs a row above some cuts, and once more above cuts between two of these if too many logits lie there;
`narrow` says after each time, once a row, which two cuts enclose the floor; `collect` copies the logits between them,
and sums the weights above them by groups. Invariants: sums have an order of their own, whatever the batch and the grid;
in rows that `_select` has done, a program only looks at the kind.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.sample.floors import N_SAMPLES, bound, float_of, key_of, weights_of

DONE = tl.constexpr(0)
KNOWN = tl.constexpr(1)
COUNT = tl.constexpr(2)
MASS = tl.constexpr(3)
"""Kinds of rows: the token is chosen; the floor is known; so many logits are kept; a share of the weight is."""
N_CUTS = tl.constexpr(8)
"""The first is below all that may be kept."""
PART = tl.constexpr(4096)
"""Columns whose weights are summed first."""
TILE = tl.constexpr(2048)
"""Columns that are looked through for logits to be collected at once."""
LOWER = tl.constexpr(9)
UPPER = tl.constexpr(10)
TARGET = tl.constexpr(11)
WHOLE = tl.constexpr(12)
N_MARKS = tl.constexpr(13)
"""Marks of a row, float64: the largest logit; N_CUTS cuts; what `narrow` found: the logits from LOWER on have what is
wanted of the row, those from UPPER on do not and lack TARGET of it; the whole weight."""
BETWEEN = tl.constexpr(0)
PLACE = tl.constexpr(1)
TURN = tl.constexpr(2)
N_COUNTS = tl.constexpr(3)
"""Counts of a row: the logits from LOWER to UPPER, to be collected (0: none has to be, the floor is UPPER; more than
there is room: it is not done); the cut that LOWER is; the turn of `measure` that it is of."""


@triton.jit
def guessed_cuts(start, width, floor, low, base, slope, of_weights, target, share):  # type: ignore[no-untyped-def]
    """[N_CUTS]: `floor`, then logits between which the weight of a row, summed from the top, should reach the target.

    Four standard errors around what a sample says; of weights it wants the share, of counts (of_weights 0) the target
    itself. low: a floor of what is sought, which is certain.
    """
    at = (tl.arange(0, N_SAMPLES).to(tl.int64) * width // N_SAMPLES).to(tl.int32)
    x = tl.load(start + at).to(tl.float32)
    weights = weights_of(x, base, of_weights, floor)
    total = tl.sum(weights, 0)
    wanted = tl.minimum(tl.where(of_weights == 0, target / width * N_SAMPLES, share * total), total).to(tl.float32)
    error = 4.0 * tl.sqrt(wanted * (total - wanted) * tl.sum(weights * weights, 0)) / tl.maximum(total, 1e-30)
    nothing = tl.zeros([N_SAMPLES], tl.float32)
    c = tl.maximum(bound(x, weights, nothing, base, of_weights, wanted - error, 1), low)
    a = tl.maximum(bound(x, weights, nothing, base, of_weights, wanted + error, 1), low)
    a = tl.where(a > float("-inf"), a, c)
    place = tl.arange(0, N_CUTS)
    return tl.where(place == 0, floor, _spread(a, tl.maximum(a, c), place - 1, N_CUTS - 2))


@triton.jit
def _spread(low, high, place, n_steps):  # type: ignore[no-untyped-def]
    """From low at place 0 to high at place n_steps, never falling: even, or even in the ordered bits where the logits
    are near to each other or their difference is not finite."""
    low_key, n_keys = key_of(low), key_of(high) - key_of(low)
    by_bits = float_of(low_key + n_keys * place // n_steps)
    share = place.to(tl.float32) / n_steps
    even = tl.where(low > -1e37, low, 0.0) * (1 - share) + tl.where(high < 1e37, high, 0.0) * share
    inner = tl.where((place > 0) & (place < n_steps), even, by_bits)
    return tl.where((low > -1e37) & (high < 1e37) & (n_keys > 4096), inner, by_bits)


@triton.jit(do_not_specialize=["line", "n_parts"], do_not_specialize_on_alignment=["controls"])  # type: ignore[untyped-decorator]
def narrow(  # type: ignore[no-untyped-def]
    controls, line, kinds, marks, found, sums, counts, n_parts,
    TURN_NOW: tl.constexpr, ROOM: tl.constexpr, N_PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Fills the marks and `found`, the counts, of a wide row from what `measure` left; the second turn only where the
    first left more than ROOM. Between turns the cuts become others, from LOWER to UPPER.

    sums, counts: [2, n_parts, N_CUTS] of a row.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + row)
    marks += row * N_MARKS
    found += row * N_COUNTS
    place = tl.arange(0, N_CUTS)
    cuts = tl.load(marks + 1 + place).to(tl.float32)
    first = tl.max(tl.where(place == 0, cuts, float("-inf")), 0)
    if (TURN_NOW == 0) & (kind == KNOWN):
        tl.store(marks + UPPER, first)
        tl.store(found + BETWEEN, 0)
    is_due = kind >= COUNT
    if TURN_NOW == 1:
        is_due = is_due & (tl.load(found + BETWEEN, mask=is_due, other=0) > ROOM)
    if is_due:
        top = float_of(key_of(tl.load(marks).to(tl.float32)) + 1)
        whole = (kind * 0 - 1).to(tl.float64)
        if TURN_NOW == 1:
            top, whole = tl.load(marks + UPPER).to(tl.float32), tl.load(marks + WHOLE)
            sums += n_parts * N_CUTS
            counts += n_parts * N_CUTS
        at = row * (2 * n_parts * N_CUTS) + tl.arange(0, N_PARTS)[:, None] * N_CUTS + place[None, :]
        is_part = tl.arange(0, N_PARTS)[:, None] < n_parts
        totals = tl.sum(tl.load(sums + at, mask=is_part, other=0.0).to(tl.float64), 0)
        numbers = tl.sum(tl.load(counts + at, mask=is_part, other=0), 0)
        whole = tl.where(whole < 0, tl.sum(tl.where(place == 0, totals, 0.0), 0), whole)
        top_k, top_p = tl.load(controls + 3 * line + row), tl.load(controls + 4 * line + row)
        target = tl.where(kind == COUNT, top_k, top_p * whole)
        cut = tl.maximum(tl.sum((totals >= target).to(tl.int32), 0) - 1, 0)
        lower = tl.max(tl.where(place == cut, cuts, float("-inf")), 0)
        upper = tl.where(cut == N_CUTS - 1, top, tl.max(tl.where(place == cut + 1, cuts, float("-inf")), 0))
        above = tl.sum(tl.where(place == cut + 1, totals, 0.0), 0)
        n = tl.sum(tl.where(place == cut, numbers, tl.where(place == cut + 1, -numbers, 0)), 0)
        is_one = key_of(upper) - key_of(lower) <= 1  # equal logits, however many
        if (TURN_NOW == 0) & (n > ROOM) & (is_one == 0):
            tl.debug_barrier()  # all threads have the cuts
            tl.store(marks + 1 + place, _spread(lower, upper, place, N_CUTS - 1))
        tl.store(marks + LOWER, lower)
        tl.store(marks + UPPER, tl.where(is_one, lower, upper))
        tl.store(marks + TARGET, target - above)
        tl.store(marks + WHOLE, whole)
        tl.store(found + BETWEEN, tl.where(is_one, 0, n))
        tl.store(found + PLACE, cut)
        tl.store(found + TURN, TURN_NOW)


@triton.jit(do_not_specialize=["line", "n_parts"], do_not_specialize_on_alignment=["controls"])  # type: ignore[untyped-decorator]
def measure(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, kinds, marks, found, sums, counts, n_parts,
    TURN_NOW: tl.constexpr, ROOM: tl.constexpr, LEAST_SLOPE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of each part of a wide row and of each cut: the weight (COUNT: the number) and the number of the logits that are
    not below it. The second turn is for rows in which the first left more than ROOM."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    kind = tl.load(kinds + row)
    is_due = kind >= COUNT
    if TURN_NOW == 1:
        is_due = is_due & (tl.load(found + row * N_COUNTS + BETWEEN, mask=is_due, other=0) > ROOM)
    if is_due:
        marks += row * N_MARKS
        cells = (row * 2 + TURN_NOW) * n_parts * N_CUTS
        base = tl.load(marks).to(tl.float32)
        slope = tl.maximum(tl.load(controls + line + row).to(tl.float32), LEAST_SLOPE)
        slope = tl.where(kind == COUNT, 0.0, slope)
        for part in range(tl.program_id(0), n_parts, tl.num_programs(0)):
            columns = part * PART + tl.arange(0, PART)
            x = tl.load(logits + row * stride + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
            weights = weights_of(x, base, slope, float("-inf"))
            for i in tl.static_range(N_CUTS):
                is_in = x >= tl.load(marks + 1 + i).to(tl.float32)
                tl.store(sums + cells + part * N_CUTS + i, tl.sum(tl.where(is_in, weights, 0.0), 0))
                tl.store(counts + cells + part * N_CUTS + i, tl.sum((is_in & (x > float("-inf"))).to(tl.int32), 0))


@triton.jit(do_not_specialize=["line", "n_parts"], do_not_specialize_on_alignment=["controls"])  # type: ignore[untyped-decorator]
def collect(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, kinds, marks, found, sums, counts, n_parts, floats, more, values, columns,
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr, ROOM: tl.constexpr, LEAST_SLOPE: tl.constexpr,
    N_PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of each group of a wide row: the weight of what is kept for certain, and 0 into `more`; and the logits that may
    be kept, in vocabulary order, with their columns, if ROOM holds them."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    kind = tl.load(kinds + row)
    if kind > DONE:
        marks += row * N_MARKS
        found += row * N_COUNTS
        base, upper = tl.load(marks).to(tl.float32), tl.load(marks + UPPER).to(tl.float32)
        slope = tl.maximum(tl.load(controls + line + row).to(tl.float32), LEAST_SLOPE)
        n_each = tl.cdiv(n_parts, tl.num_programs(0))
        first = tl.program_id(0) * n_each
        n = tl.load(found + BETWEEN)
        is_listed = (n > 0) & (n <= ROOM)
        lower, n_before = upper, n * 0
        if is_listed:
            lower, cut = tl.load(marks + LOWER).to(tl.float32), tl.load(found + PLACE)
            parts = tl.arange(0, N_PARTS)
            place = counts + (row * 2 + tl.load(found + TURN)) * n_parts * N_CUTS + parts * N_CUTS + cut
            before = tl.load(place, mask=parts < first, other=0)
            before -= tl.load(place + 1, mask=parts < tl.where(cut < N_CUTS - 1, first, 0), other=0)
            n_before = tl.sum(before, 0)
        groups = tl.arange(0, TILE // GROUP)
        for tile in range(first * (PART // TILE), tl.minimum(first + n_each, n_parts) * (PART // TILE)):
            group = tile * (TILE // GROUP) + groups
            column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
            is_group = group * GROUP < width
            certain = tl.sum(weights_of(x, base, slope, upper), 1)
            tl.store(floats + row * (2 * N_GROUPS) + N_GROUPS + group, certain, mask=is_group)
            tl.store(more + row * N_GROUPS + group, tl.zeros([TILE // GROUP], tl.int64), mask=is_group)
            if is_listed:
                is_in = ((x >= lower) & (x < upper) & (x > float("-inf"))).to(tl.int32)
                n_in = tl.sum(is_in, 1)
                place = n_before + (tl.cumsum(n_in, 0) - n_in)[:, None] + tl.cumsum(is_in, 1) - 1
                tl.store(values + row * ROOM + place, x, mask=is_in > 0)
                tl.store(columns + row * ROOM + place, column, mask=is_in > 0)
                n_before += tl.sum(n_in, 0)
