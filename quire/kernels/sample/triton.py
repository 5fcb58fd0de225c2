"""Sampling on CUDA in two kernels, whatever the controls: `_group_stats` reads the logits once and keeps the largest
and the sum of weights of each group of columns; `_select` makes one row's choice from them.

A row that keeps everything then reads one group again. A truncated row collects the few logits that may matter, or
goes over the row again when they are many (see `floors`). Invariants: a row's token is the same, bit for bit, in any
batch and run (groups are fixed, nothing is atomic, no kernel is compiled for a row count); what to do is read from
the controls on the device, so that a graph serves any of them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.sample.draw import EMPTY, FINE, NON_FINITE, Choice, TokenMasks
from quire.kernels.sample.floors import block_sums, floor_of, weights_of
from quire.kernels.sample.penalties_triton import penalise

__all__ = ["choose_by", "penalise"]

GROUP = 128
"""Columns of a group."""
CHUNK = 2048
"""Columns read by one program of `_group_stats`."""
ROOM = 8192
"""Logits that may be collected from a row."""
MAX_REGISTERS = 128
"""Of a thread of `_select`: two rows share a multiprocessor, although the rare ways of `floors` then spill."""
LEAST_SLOPE = 1.2e-38
"""Stands for 1 / temperature = 0, so that -inf keeps its weight of 0."""


def choose_by(logits: torch.Tensor, controls: torch.Tensor, out: Choice, masks: TokenMasks | None = None) -> None:
    """See `op.choose_by`. Logits are read as they are and computed with in float32."""
    n_rows, width = logits.shape
    lines, bits = (None, None) if masks is None else (masks.lines, masks.bits)
    n_groups, room = triton.cdiv(width, GROUP), min(ROOM, width)
    padded = triton.next_power_of_2(n_groups)
    floats = torch.empty((n_rows, 2 * padded), dtype=torch.float32, device=logits.device)
    collected = torch.empty((n_rows, room), dtype=logits.dtype, device=logits.device)
    ints = torch.empty((n_rows, padded + room), dtype=torch.int32, device=logits.device)
    dependent = _has_dependent_launch(logits.device)
    _group_stats[(triton.cdiv(width, CHUNK), n_rows)](
        logits, logits.stride(0), width, controls, controls.stride(0), floats, n_groups,
        lines, bits, 0 if bits is None else bits.stride(0), 0 if bits is None else bits.shape[1],
        GROUP=GROUP, N_GROUPS=padded, CHUNK=CHUNK, LEAST_SLOPE=LEAST_SLOPE, DEPENDENT=dependent,
        num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    _select[(n_rows,)](
        logits, logits.stride(0), width, controls, controls.stride(0), floats, collected, ints, n_groups, room,
        out.token_ids, out.status,
        GROUP=GROUP, N_GROUPS=padded, ROOM=ROOM, LEAST_SLOPE=LEAST_SLOPE,
        FINE=FINE, NON_FINITE=NON_FINITE, EMPTY=EMPTY, DEPENDENT=dependent,
        num_warps=8, maxnreg=MAX_REGISTERS, launch_pdl=dependent,
    )  # fmt: skip


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    """Kernels may be launched before the one before has ended (programmatic dependent launch), then wait for it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


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


@triton.jit(do_not_specialize=["line"], do_not_specialize_on_alignment=["controls", "token_ids", "status"])  # type: ignore[untyped-decorator]
def _select(  # type: ignore[no-untyped-def]
    logits, stride, width, controls, line, floats, collected, ints, n_groups, room, token_ids, status,
    GROUP: tl.constexpr, N_GROUPS: tl.constexpr, ROOM: tl.constexpr, LEAST_SLOPE: tl.constexpr,
    FINE: tl.constexpr, NON_FINITE: tl.constexpr, EMPTY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The token and status of one row. Scratch of a row: collected: [room] logits, of their dtype; ints: [N_GROUPS]
    groups listed, [room] columns collected."""
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    uniform = tl.load(controls + row)
    inverse = tl.load(controls + line + row)
    drop = tl.load(controls + 2 * line + row)
    top_k = tl.load(controls + 3 * line + row)
    top_p = tl.load(controls + 4 * line + row)
    slope = tl.maximum(inverse.to(tl.float32), LEAST_SLOPE)
    start = logits + row * stride
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
    entries, n_entries, floor, is_list = start, width, float("-inf"), 0
    is_cut = (drop > float("-inf")) | ((top_k > 0) & (top_k < width)) | (top_p < 1)
    if (code == FINE) & (inverse > 0) & is_cut:
        found = ints + row * (N_GROUPS + room)
        entries, n_entries, floor = floor_of(
            start, width, peaks, shares, base, slope, drop, top_k, top_p, found, found + N_GROUPS,
            collected + row * room, GROUP, N_GROUPS, ROOM,
        )  # fmt: skip
        is_list = (n_entries < width).to(tl.int32)
        block_sums(entries, n_entries, base, slope, floor, sums_at, GROUP)
        shares = tl.load(sums_at + groups, mask=groups * GROUP < n_entries, other=0.0)

    # greedy: the first group that has the peak; random: the one in which the cumulative sum passes its target
    target = uniform * tl.sum(shares.to(tl.float64), 0)
    random_group, before = _first_above(shares, target, groups, N_GROUPS)
    greedy_group = tl.min(tl.where(peaks == peak, groups, N_GROUPS), 0)
    group = tl.minimum(tl.where(inverse == 0, greedy_group, random_group), n_groups - 1)
    within = tl.arange(0, GROUP)
    x = tl.load(entries + group * GROUP + within, mask=group * GROUP + within < n_entries, other=float("-inf"))
    x = x.to(tl.float32)
    largest = tl.min(tl.where(x == tl.max(x, 0), within, GROUP - 1), 0)
    drawn, _ = _first_above(weights_of(x, base, slope, floor), target - before, within, GROUP)
    at = group * GROUP + tl.where((inverse == 0) | (drawn == GROUP), largest, drawn)
    token = tl.load(ints + row * (N_GROUPS + room) + N_GROUPS + at, mask=is_list > 0, other=0)
    token = tl.where(is_list > 0, token, at)
    tl.store(token_ids + row, tl.where(code == FINE, token, 0))
    tl.store(status + row, code.to(tl.uint8))
