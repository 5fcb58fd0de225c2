"""Sampling on CUDA in two kernels: `_group_stats` reads the logits once and keeps the largest and the sum of weights of
each group of columns; `_select` makes one row's choice from them.

A row that keeps everything then reads one group again. A truncated row collects the few logits that may matter. Where
they are thousands, programs of `wide` and `_finish` go over it again. Invariants: a row's token is the same, bit for
bit, in any batch and run (sums have an order of their own, what is atomic is whole numbers, no kernel is compiled for
a row count); what to do is read from the controls on the device, so that a graph serves any of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper import has_dependent_launch
from quire.kernels.sample import hopper
from quire.kernels.sample.draw import EMPTY, FINE, NON_FINITE, Choice, TokenMasks
from quire.kernels.sample.floors import (
    LIST,
    block_sums,
    float_of,
    floor_of,
    key_of,
    largest_in,
    largest_of,
    mass,
    weights_of,
)
from quire.kernels.sample.lines_triton import lines
from quire.kernels.sample.penalties_triton import penalise, widen
from quire.kernels.sample.wide import COUNT, DONE, KNOWN, MASS, N_MARKS, SPAN, collect, guessed
from quire.kernels.selector import missed

__all__ = ["choose_by", "lines", "penalise", "widen"]

_Given = tuple[torch.Tensor, int, int, torch.Tensor, int]
"""Logits and controls with their strides."""

GROUP = 128
"""Columns of a group."""
CHUNK = 2048
"""Columns read by one program of `_group_stats`."""
ROOM = 8192
"""Logits that may be listed of a wide row, at most."""
MAX_REGISTERS = 128
"""Of a thread where a program has a row: two rows share a multiprocessor."""
LEAST_SLOPE = 1.2e-38
"""Stands for 1 / temperature = 0, so that -inf keeps its weight of 0."""
ONE = tl.constexpr(1 << 36)
"""Weight 1 in whole numbers, whose sum is the same in any order, in float64, too: 2^53 are 2^17 of them."""


def choose_by(
    logits: torch.Tensor,
    controls: torch.Tensor,
    out: Choice,
    masks: TokenMasks | None = None,
    truncates: bool = True,
) -> None:
    """See `op.choose_by`. Logits are read as they are and computed with in float32."""
    n_rows, width = logits.shape
    lines, bits = (None, None) if masks is None else (masks.lines, masks.bits)
    n_groups = triton.cdiv(width, GROUP)
    padded = triton.next_power_of_2(n_groups)
    floats = torch.empty((n_rows, 2 * padded), dtype=torch.float32, device=logits.device)
    values = torch.empty((n_rows, LIST.value), dtype=logits.dtype, device=logits.device)
    ints = torch.empty((n_rows, LIST.value + padded), dtype=torch.int32, device=logits.device)
    kinds = torch.empty((2, n_rows), dtype=torch.int32, device=logits.device)
    marks = torch.empty((n_rows, N_MARKS.value), dtype=torch.float32, device=logits.device)
    dependent = has_dependent_launch(logits.device)
    given = logits, logits.stride(0), width, controls, controls.stride(0)
    _group_stats[(triton.cdiv(width, CHUNK), n_rows)](
        *given, floats, n_groups,
        lines, bits, 0 if bits is None else bits.stride(0), 0 if bits is None else bits.shape[1],
        GROUP=GROUP, N_GROUPS=padded, CHUNK=CHUNK, LEAST_SLOPE=LEAST_SLOPE, DEPENDENT=dependent,
        num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    _select[(n_rows,)](
        *given, floats, values, ints, kinds, marks, n_groups, out.token_ids, out.status,
        GROUP=GROUP, N_GROUPS=padded, LEAST_SLOPE=LEAST_SLOPE,
        FINE=FINE, NON_FINITE=NON_FINITE, EMPTY=EMPTY, DEPENDENT=dependent,
        num_warps=8, maxnreg=MAX_REGISTERS, launch_pdl=dependent,
    )  # fmt: skip
    if truncates and width > LIST.value:
        _choose_in_wide_rows(given, (floats, kinds, marks), n_groups, out, dependent)


def _choose_in_wide_rows(
    given: _Given, found: tuple[torch.Tensor, ...], n_groups: int, out: Choice, dependent: bool
) -> None:
    """The tokens of rows that `_select` left. found: its results."""
    logits, width = given[0], given[2]
    floats, kinds, marks = found
    n_rows, n_spans = len(logits), triton.cdiv(width, SPAN.value)
    sums = torch.empty((n_rows, 2, n_spans), dtype=torch.float32, device=logits.device)
    room = min(ROOM, triton.next_power_of_2(width))
    values = torch.empty((n_rows, room), dtype=torch.float32, device=logits.device)
    columns = torch.empty((n_rows, room), dtype=torch.int32, device=logits.device)
    more = torch.empty((n_rows, floats.shape[1] // 2), dtype=torch.int64, device=logits.device)
    state = kinds[0], marks, sums, kinds[1], values, columns, floats, more
    sizes = {"GROUP": GROUP, "N_GROUPS": floats.shape[1] // 2, "ROOM": room, "LEAST_SLOPE": LEAST_SLOPE}
    sizes |= {"DEPENDENT": dependent, "launch_pdl": dependent}
    reason = hopper.obstacle(logits)
    if reason is None:
        hopper.collect(*given, n_spans, *state, LEAST_SLOPE)
    else:
        missed("sample", "hopper", reason, "triton")
        collect[(n_spans, n_rows)](*given, n_spans, *state, **sizes, num_warps=8)
    _finish[(n_rows,)](
        *given, n_spans, *state, n_groups, out.token_ids,
        N_SPANS=triton.next_power_of_2(n_spans), **sizes, num_warps=16, maxnreg=64,
    )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["line", "mask_stride", "n_words"], do_not_specialize_on_alignment=["controls", "mask_lines"]
)
def _group_stats(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, floats, n_groups, mask_lines, mask_bits, mask_stride, n_words,
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr, CHUNK: tl.constexpr, LEAST_SLOPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of each group of one chunk of a row: the largest logit and the sum of weights relative to it (NaN if one is).
    Logits that the row's mask does not allow become -inf first.

    A group is cut into four parts, so that eight neighbouring threads hold it and each adds up four runs of its own; a
    part is one word of a mask:

        parts x groups x columns of a part

    floats: scratch of a row: [N_GROUPS] largest logits, [N_GROUPS] sums.
    """
    if DEPENDENT:  # nothing is read or written before the kernel before this one has ended
        gdc_wait()
        gdc_launch_dependents()
    PART: tl.constexpr = GROUP // 4
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    within = tl.arange(0, 4)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    columns = group[None, :, None] * GROUP + within
    x = tl.load(logits + row * stride + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    if mask_lines is not None:
        mask_line = tl.load(mask_lines + row).to(tl.int64)
        if mask_line >= 0:
            word = group[None, :, None] * (GROUP // PART) + tl.arange(0, GROUP // PART)[:, None, None]
            words = tl.load(mask_bits + mask_line * mask_stride + word, mask=word < n_words, other=0)
            x += tl.where(((words >> tl.arange(0, PART)[None, None, :]) & 1) != 0, 0.0, float("-inf"))
            tl.store(logits + row * stride + columns, x, mask=columns < width)
    slope = tl.maximum(tl.load(controls + line + row).to(tl.float32), LEAST_SLOPE)
    peaks = tl.max(tl.max(x, 0), 1)
    base = tl.where(peaks > float("-inf"), peaks, 0.0)
    sums = tl.sum(tl.sum(tl.exp((x - base[None, :, None]) * slope), 0), 1)
    place = floats + row * (2 * N_GROUPS) + group
    tl.store(place, peaks, mask=group < n_groups)
    tl.store(place + N_GROUPS, sums, mask=group < n_groups)


@triton.jit  # type: ignore[untyped-decorator]
def _first_above(weights, target, index, NOWHERE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first index where the cumulative weight exceeds target, the cumulative weight before it), in float64.

    A target that rounding put at the total or beyond finds the last index with any weight; NOWHERE if there is none.
    """
    cumulative = tl.cumsum(weights.to(tl.float64), 0)
    above = tl.min(tl.where((cumulative > target) & (weights > 0), index, NOWHERE), 0)
    last = tl.max(tl.where(weights > 0, index, -1), 0)
    found = tl.where(above == NOWHERE, tl.where(last < 0, NOWHERE, last), above)
    before = tl.sum(tl.where(index == found - 1, cumulative, 0.0), 0)
    return found, before


@triton.jit  # type: ignore[untyped-decorator]
def _place_in(  # type: ignore[no-untyped-def]
    entries, n_entries, shares, uniform, is_greedy, greedy_group, base, slope, floor, n_groups,
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr,
):  # fmt: skip
    """Which entry is chosen: greedy, the first of the largest of `greedy_group`; else where the cumulative weight
    passes its target. shares: weights of the entries' groups."""
    groups = tl.arange(0, N_GROUPS)
    target = uniform * tl.sum(shares.to(tl.float64), 0)
    random_group, before = _first_above(shares, target, groups, N_GROUPS)
    group = tl.minimum(tl.where(is_greedy, greedy_group, random_group), n_groups - 1)
    within = tl.arange(0, GROUP)
    x = tl.load(entries + group * GROUP + within, mask=group * GROUP + within < n_entries, other=float("-inf"))
    x = x.to(tl.float32)
    largest = tl.min(tl.where(x == tl.max(x, 0), within, GROUP - 1), 0)
    drawn, _ = _first_above(weights_of(x, base, slope, floor), target - before, within, GROUP)
    return group * GROUP + tl.where(is_greedy | (drawn == GROUP), largest, drawn)


@triton.jit(do_not_specialize=["line"], do_not_specialize_on_alignment=["controls", "token_ids", "status"])  # type: ignore[untyped-decorator]
def _select(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, floats, values, ints, kinds, marks, n_groups, token_ids, status,
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr, LEAST_SLOPE: tl.constexpr,
    FINE: tl.constexpr, NON_FINITE: tl.constexpr, EMPTY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The status and the token of one row; of a wide row instead of the token its marks. kinds: int32 [2, n_rows], the
    kind and 0, as nothing is listed yet.

    Scratch of a row: values [LIST], logits collected; ints [LIST + N_GROUPS], where they stand, and groups.
    """
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    uniform = tl.load(controls + row)
    inverse = tl.load(controls + line + row)
    drop = tl.load(controls + 2 * line + row)
    top_k = tl.load(controls + 3 * line + row)
    top_p = tl.load(controls + 4 * line + row)
    slope = tl.maximum(inverse.to(tl.float32), LEAST_SLOPE)
    start, columns = logits + row * stride, ints + row * (LIST + N_GROUPS)
    peaks_at = floats + row * (2 * N_GROUPS)
    sums_at = peaks_at + N_GROUPS
    groups = tl.arange(0, N_GROUPS)
    peaks = tl.load(peaks_at + groups, mask=groups < n_groups, other=float("-inf"))
    sums = tl.load(sums_at + groups, mask=groups < n_groups, other=0.0)
    peak = tl.max(peaks, 0)
    is_bad = (tl.sum((sums != sums).to(tl.int32), 0) > 0) | (peak == float("inf"))
    code = tl.where(is_bad, NON_FINITE, tl.where(peak == float("-inf"), EMPTY, FINE))
    base = tl.where(code == FINE, peak, 0.0)
    shares = tl.where(code == FINE, sums * tl.exp((peaks - base) * slope), 0.0)

    # what the cumulative distribution runs over: the row, or the logits collected from it
    entries, n_entries, floor, is_list, kind = start, width, float("-inf"), 0, 0
    is_cut = (drop > float("-inf")) | ((top_k > 0) & (top_k < width)) | (top_p < 1)
    if (code == FINE) & (inverse > 0) & is_cut:
        entries, is_list = values + row * LIST, 1
        n_entries, floor, low = floor_of(
            start, width, peaks, shares, base, slope, drop, top_k, top_p, columns + LIST, columns, entries,
            GROUP, N_GROUPS,
        )  # fmt: skip
        if n_entries > LIST:
            n_entries = n_entries * 0
            is_count = (top_k > 0) & (top_k < width)
            kind = tl.where(is_count, COUNT, tl.where(top_p < 1, MASS, KNOWN))
            lower, upper = floor, floor
            if kind >= COUNT:
                of_weights, target = tl.where(is_count, 0.0, slope), tl.where(is_count, top_k, 0.0)
                whole = tl.sum(shares.to(tl.float64), 0)
                lower, upper = guessed(start, width, floor, low, base, of_weights, target, top_p, whole)
            place = marks + row * N_MARKS
            tl.store(place, base)
            tl.store(place + 1, floor)
            tl.store(place + 2, lower)
            tl.store(place + 3, upper)
        block_sums(entries, n_entries, base, slope, floor, sums_at, GROUP)
        shares = tl.load(sums_at + groups, mask=groups * GROUP < n_entries, other=0.0)

    greedy_group = tl.min(tl.where(peaks == peak, groups, N_GROUPS), 0)
    is_greedy = inverse == 0
    at = _place_in(
        entries, n_entries, shares, uniform, is_greedy, greedy_group, base, slope, floor, n_groups, GROUP, N_GROUPS
    )
    token = tl.load(columns + at, mask=(is_list > 0) & (at < n_entries), other=0)
    token = tl.where(is_list > 0, token, at)
    tl.store(kinds + row, kind)
    tl.store(kinds + tl.num_programs(0) + row, 0)
    tl.store(token_ids + row, tl.where(code == FINE, token, 0))
    tl.store(status + row, code.to(tl.uint8))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["line", "n_spans"], do_not_specialize_on_alignment=["controls", "n_listed", "token_ids"]
)
def _finish(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, n_spans, kinds, marks, sums, n_listed, values, columns, floats, more,
    n_groups, token_ids, GROUP: tl.constexpr, N_GROUPS: tl.constexpr, ROOM: tl.constexpr, LEAST_SLOPE: tl.constexpr,
    N_SPANS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The token of a wide row, from what `wide.collect` left: the floor lies among the logits listed, whose weights are
    added to those of their groups. Where it does not, or they are too many, the row is gone over again and again."""
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + row)
    if kind > DONE:
        top_k, top_p = tl.load(controls + 3 * line + row), tl.load(controls + 4 * line + row)
        slope = tl.maximum(tl.load(controls + line + row).to(tl.float32), LEAST_SLOPE)
        start, sums_at = logits + row * stride, floats + row * (2 * N_GROUPS) + N_GROUPS
        more += row * N_GROUPS
        marks += row * N_MARKS
        base, floor, lower, upper = tl.load(marks), tl.load(marks + 1), tl.load(marks + 2), tl.load(marks + 3)
        is_collected = kind == KNOWN
        if kind >= COUNT:
            span, of_weights = tl.arange(0, N_SPANS), tl.where(kind == COUNT, 0.0, slope)
            at = sums + row * (2 * n_spans) + span
            above = tl.sum(tl.load(at, mask=span < n_spans, other=0.0).to(tl.float64), 0)
            whole = tl.sum(tl.load(at + n_spans, mask=span < n_spans, other=0.0).to(tl.float64), 0)
            target = tl.where(kind == COUNT, top_k, top_p * whole)
            n = tl.load(n_listed + row)
            index = tl.arange(0, ROOM)
            x = tl.load(values + row * ROOM + index, mask=index < n, other=float("-inf"))
            weights = (weights_of(x, base, of_weights, float("-inf")) * ONE).to(tl.int64).to(tl.float32) / ONE
            is_within = (above < target) & (above + tl.sum(weights.to(tl.float64), 0) >= target)
            if is_within & (n <= ROOM):
                floor = largest_in(x, weights, lower, float_of(key_of(upper) - 1), target - above)
                weights = weights_of(x, base, slope, floor)
                column = tl.load(columns + row * ROOM + index, mask=index < n, other=0)
                tl.atomic_add(more + column // GROUP, (weights * ONE).to(tl.int64), mask=weights > 0, sem="relaxed")
                tl.debug_barrier()
                is_collected = n >= 0
            else:
                low, high = tl.where(above < target, floor, upper), tl.where(above < target, upper, base)
                floor = largest_of(start, width, base, of_weights, low, high, target)
            if (kind == COUNT) & (top_p < 1):
                whole = mass(start, width, floor, base, slope)
                floor = largest_of(start, width, base, slope, floor, base, top_p * whole)
                is_collected = n < 0
        groups = tl.arange(0, N_GROUPS)
        if is_collected:
            added = tl.load(more + groups, mask=groups < n_groups, other=0).to(tl.float32) / ONE
            shares = tl.load(sums_at + groups, mask=groups < n_groups, other=0.0) + added
        else:
            block_sums(start, width, base, slope, floor, sums_at, GROUP)
            shares = tl.load(sums_at + groups, mask=groups < n_groups, other=0.0)
        uniform = tl.load(controls + row)
        token = _place_in(start, width, shares, uniform, kind < 0, 0, base, slope, floor, n_groups, GROUP, N_GROUPS)
        tl.store(token_ids + row, token)
