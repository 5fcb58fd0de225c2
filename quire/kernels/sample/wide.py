"""Rows that may keep thousands of logits, with several programs a row, in Triton: where the smallest kept one lies.

`measure` weighs a row above some cuts, and once more above cuts between two of these if too many logits lie there;
`collect` copies those between the two cuts that enclose the floor, and sums the weights above them by groups;
`narrowed` says what both found. Invariants: sums have an order of their own, whatever the batch and the grid; in rows
that `_select` has done, a program only looks at the kind.
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


@triton.jit  # type: ignore[untyped-decorator]
def _bracket(cuts, top, sums, counts, n_parts, part, kind, top_k, top_p, whole, N_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(lower, upper, weight from upper on, logits between, those of them in parts before this one, whole weight):
    neighbouring cuts, or the last and `top`, from which on there is nothing. The logits from lower on have what is
    wanted of a row, those from upper on do not.

    sums, counts: [n_parts, N_CUTS] of `measure`; whole < 0: it is that of the first cut.
    """
    parts, place = tl.arange(0, N_PARTS), tl.arange(0, N_CUTS)
    at = parts[:, None] * N_CUTS + place[None, :]
    totals = tl.sum(tl.load(sums + at, mask=parts[:, None] < n_parts, other=0.0).to(tl.float64), 0)
    whole = tl.where(whole < 0, tl.sum(tl.where(place == 0, totals, 0.0), 0), whole)
    target = tl.where(kind == COUNT, top_k, top_p * whole)
    found = tl.maximum(tl.sum((totals >= target).to(tl.int32), 0) - 1, 0)
    lower = tl.max(tl.where(place == found, cuts, float("-inf")), 0)
    upper = tl.where(found == N_CUTS - 1, top, tl.max(tl.where(place == found + 1, cuts, float("-inf")), 0))
    above = tl.sum(tl.where(place == found + 1, totals, 0.0), 0)
    sign = tl.where(place == found, 1, tl.where(place == found + 1, -1, 0))
    between = tl.sum(tl.load(counts + at, mask=parts[:, None] < n_parts, other=0) * sign[None, :], 1)
    n_before = tl.sum(tl.where(parts < part, between, 0), 0)
    return lower, upper, above, tl.sum(between, 0), n_before, whole


@triton.jit  # type: ignore[untyped-decorator]
def narrowed(marks, sums, counts, n_parts, part, kind, top_k, top_p, ROOM: tl.constexpr, N_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `_bracket`, after both turns of `measure`; n = 0 where nothing has to be collected, as the floor is upper.

    marks: [1 + N_CUTS] of a row: the largest logit, and the cuts of the first turn. sums, counts: [2, n_parts, N_CUTS].
    """
    cuts = tl.load(marks + 1 + tl.arange(0, N_CUTS))
    top = float_of(key_of(tl.load(marks)) + 1)
    lower = tl.max(tl.where(tl.arange(0, N_CUTS) == 0, cuts, float("-inf")), 0)
    upper, above, n, n_before, whole = lower, (top_p * 0).to(tl.float64), part * 0, part * 0, top_p * 0 - 1
    if kind >= COUNT:
        lower, upper, above, n, n_before, whole = _bracket(
            cuts, top, sums, counts, n_parts, part, kind, top_k, top_p, whole, N_PARTS
        )
        if n > ROOM:
            n_cells = n_parts * N_CUTS
            lower, upper, above, n, n_before, whole = _bracket(
                _spread(lower, upper, tl.arange(0, N_CUTS), N_CUTS - 1), upper, sums + n_cells, counts + n_cells,
                n_parts, part, kind, top_k, top_p, whole, N_PARTS,
            )  # fmt: skip
        if key_of(upper) - key_of(lower) <= 1:  # equal logits, however many
            upper, n = lower, n * 0
    return lower, upper, above, n, n_before, whole


@triton.jit(do_not_specialize=["line", "n_parts"], do_not_specialize_on_alignment=["controls"])  # type: ignore[untyped-decorator]
def measure(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, kinds, marks, sums, counts, n_parts,
    TURN: tl.constexpr, ROOM: tl.constexpr, LEAST_SLOPE: tl.constexpr, N_PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of each part of a wide row and of each cut: the weight (COUNT: the number) and the number of the logits that are
    not below it. The second turn is for rows in which the first left more than ROOM."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    kind = tl.load(kinds + row)
    if kind >= COUNT:
        marks += row * (1 + N_CUTS)
        sums += row * (2 * n_parts * N_CUTS)
        counts += row * (2 * n_parts * N_CUTS)
        base = tl.load(marks)
        slope = tl.maximum(tl.load(controls + line + row).to(tl.float32), LEAST_SLOPE)
        slope = tl.where(kind == COUNT, 0.0, slope)
        place = tl.arange(0, N_CUTS)
        cuts = tl.load(marks + 1 + place)
        n_left = ROOM + 1
        if TURN == 1:
            top_k, top_p = tl.load(controls + 3 * line + row), tl.load(controls + 4 * line + row)
            lower, upper, _, n_left, _, _ = _bracket(
                cuts, float_of(key_of(base) + 1), sums, counts, n_parts, 0, kind, top_k, top_p, top_p * 0 - 1, N_PARTS
            )
            cuts = _spread(lower, upper, tl.arange(0, N_CUTS), N_CUTS - 1)
            sums += n_parts * N_CUTS
            counts += n_parts * N_CUTS
        if n_left > ROOM:
            for part in range(tl.program_id(0), n_parts, tl.num_programs(0)):
                columns = part * PART + tl.arange(0, PART)
                x = tl.load(logits + row * stride + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
                weights = weights_of(x, base, slope, float("-inf"))
                for i in tl.static_range(N_CUTS):
                    is_in = x >= tl.max(tl.where(place == i, cuts, float("-inf")), 0)
                    tl.store(sums + part * N_CUTS + i, tl.sum(tl.where(is_in, weights, 0.0), 0))
                    tl.store(counts + part * N_CUTS + i, tl.sum((is_in & (x > float("-inf"))).to(tl.int32), 0))


@triton.jit(do_not_specialize=["line", "n_parts"], do_not_specialize_on_alignment=["controls"])  # type: ignore[untyped-decorator]
def collect(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, kinds, marks, sums, counts, n_parts, floats, more, values, columns,
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
        marks += row * (1 + N_CUTS)
        cells = row * (2 * n_parts * N_CUTS)
        base = tl.load(marks)
        slope = tl.maximum(tl.load(controls + line + row).to(tl.float32), LEAST_SLOPE)
        top_k, top_p = tl.load(controls + 3 * line + row), tl.load(controls + 4 * line + row)
        n_each = tl.cdiv(n_parts, tl.num_programs(0))
        first = tl.program_id(0) * n_each
        lower, upper, _, n, n_before, _ = narrowed(
            marks, sums + cells, counts + cells, n_parts, first, kind, top_k, top_p, ROOM, N_PARTS
        )
        groups = tl.arange(0, TILE // GROUP)
        for tile in range(first * (PART // TILE), tl.minimum(first + n_each, n_parts) * (PART // TILE)):
            group = tile * (TILE // GROUP) + groups
            column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
            is_group = group * GROUP < width
            certain = tl.sum(weights_of(x, base, slope, upper), 1)
            tl.store(floats + row * (2 * N_GROUPS) + N_GROUPS + group, certain, mask=is_group)
            tl.store(more + row * N_GROUPS + group, tl.zeros([TILE // GROUP], tl.int64), mask=is_group)
            if (n > 0) & (n <= ROOM):
                is_in = ((x >= lower) & (x < upper) & (x > float("-inf"))).to(tl.int32)
                n_in = tl.sum(is_in, 1)
                place = n_before + (tl.cumsum(n_in, 0) - n_in)[:, None] + tl.cumsum(is_in, 1) - 1
                tl.store(values + row * ROOM + place, x, mask=is_in > 0)
                tl.store(columns + row * ROOM + place, column, mask=is_in > 0)
                n_before += tl.sum(n_in, 0)
