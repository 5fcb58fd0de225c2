"""Log-probabilities of given tokens and of the most probable ones on CUDA: the logits are read once, by groups of
columns; one program a row then looks into the groups with the largest logits.

Invariants: sums have an order of their own, whatever the batch; of equal logits the lower token id comes first; what a
row says of its target does not depend on k.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from quire.kernels.sample.floors import float_of, key_of
from quire.kernels.sample.top import top

GROUP: Final = 128
CHUNK: Final = 2048
"""Columns of a group, and of a program."""
MOST: Final = 32
"""Most probable tokens that are looked for here."""
LEAST = tl.constexpr(-(1 << 63))
"""Below all keys."""


def lines(logits: torch.Tensor, targets: torch.Tensor, k: int) -> torch.Tensor:
    """See `op.lines`."""
    n_rows, width = logits.shape
    n_groups, n_chunks = triton.cdiv(width, GROUP), triton.cdiv(width, CHUNK)
    floats = torch.empty((n_rows, n_groups + 2 * n_chunks), dtype=torch.float32, device=logits.device)
    counts = torch.empty((n_rows, n_chunks), dtype=torch.int32, device=logits.device)
    listed = torch.empty((n_rows, MOST), dtype=torch.int32, device=logits.device)
    normalisers = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    cells = torch.empty((n_rows, 1 + k, 2), dtype=torch.int32, device=logits.device)
    values = cells.view(torch.float32)
    given = logits, logits.stride(0), width, targets, floats, counts, n_groups, n_chunks
    _parts[(n_chunks, n_rows)](*given, GROUP=GROUP, CHUNK=CHUNK, num_warps=4)
    n_here = k if k <= MOST else 0
    _ends[(n_rows,)](
        *given, listed, normalisers, cells, values, cells.stride(0), n_here,
        GROUP=GROUP, MOST=8 if n_here <= 8 else MOST, N_GROUPS=triton.next_power_of_2(n_groups),
        N_CHUNKS=triton.next_power_of_2(n_chunks), num_warps=8,
    )  # fmt: skip
    if k > MOST:
        best, ids = top(logits.float(), k)
        cells[:, 1:, 0], values[:, 1:, 1] = ids, best - normalisers[:, None]
    return cells


@triton.jit(do_not_specialize_on_alignment=["targets"])  # type: ignore[untyped-decorator]
def _parts(  # type: ignore[no-untyped-def]
    logits, stride, width, targets, floats, counts, n_groups, n_chunks, GROUP: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Of one chunk of a row: the largest logit of each group, the largest of all, the sum of exponentials relative to
    it, and how many logits exceed the target's. floats: [n_groups + 2 * n_chunks] of a row."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
    chosen = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32)
    peaks = tl.max(x, 1)
    peak = tl.max(peaks, 0)
    total = tl.sum(tl.sum(tl.exp(x - tl.where(peak > float("-inf"), peak, 0.0)), 1), 0)
    floats += row * (n_groups + 2 * n_chunks)
    tl.store(floats + group, peaks, mask=group < n_groups)
    tl.store(floats + n_groups + chunk, peak)
    tl.store(floats + n_groups + n_chunks + chunk, total)
    tl.store(counts + row * n_chunks + chunk, tl.sum(tl.sum((x > chosen).to(tl.int32), 1), 0))


@triton.jit
def _keys_of(x, index):  # type: ignore[no-untyped-def]
    """int64 that order like the logits, of equal ones the lower index larger; -0 counts as 0."""
    return (key_of(x + 0.0) << 32) - index


@triton.jit(do_not_specialize=["row_stride", "k"], do_not_specialize_on_alignment=["targets"])  # type: ignore[untyped-decorator]
def _ends(  # type: ignore[no-untyped-def]
    logits, stride, width, targets, floats, counts, n_groups, n_chunks, listed, normalisers, cells, cell_values,
    row_stride, k, GROUP: tl.constexpr, MOST: tl.constexpr, N_GROUPS: tl.constexpr, N_CHUNKS: tl.constexpr,
):  # fmt: skip
    """One row. normalisers: [n_rows], the logarithm of the sum of all exponentials. cells, cell_values: what is
    returned, as int32 and as float32; rows are `row_stride` numbers apart."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    floats += row * (n_groups + 2 * n_chunks)
    chunk = tl.arange(0, N_CHUNKS)
    peaks = tl.load(floats + n_groups + chunk, mask=chunk < n_chunks, other=float("-inf"))
    sums = tl.load(floats + n_groups + n_chunks + chunk, mask=chunk < n_chunks, other=0.0)
    peak = tl.max(peaks, 0)
    total = tl.sum(tl.where(peaks > float("-inf"), sums * tl.exp(peaks - peak), sums).to(tl.float64), 0)
    normaliser = (tl.log(total) + peak).to(tl.float32)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32)
    tl.store(normalisers + row, normaliser)
    cells += row * row_stride
    cell_values += row * row_stride + 1
    tl.store(cell_values, chosen - normaliser)
    n_above = tl.sum(tl.load(counts + row * n_chunks + chunk, mask=chunk < n_chunks, other=0), 0)
    tl.store(cells, n_above + 1)
    # every other group has k groups before it, each with a logit that goes before all of its own
    group = tl.arange(0, N_GROUPS)
    keys = _keys_of(tl.load(floats + group, mask=group < n_groups, other=0.0), group)
    keys = tl.where(group < n_groups, keys, LEAST)
    n_listed = tl.minimum(k, n_groups)
    listed += row * MOST
    for i in range(n_listed):
        best = tl.max(keys, 0)
        tl.store(listed + i, (-best) & 0xFFFFFFFF)
        keys = tl.where(keys == best, LEAST, keys)
    tl.debug_barrier()
    place = tl.arange(0, MOST * GROUP)
    column = tl.load(listed + place // GROUP, mask=place // GROUP < n_listed, other=n_groups) * GROUP + place % GROUP
    keys = _keys_of(tl.load(start + column, mask=column < width, other=0.0).to(tl.float32), column)
    keys = tl.where(column < width, keys, LEAST)
    for i in range(k):
        best = tl.max(keys, 0)
        token = (-best) & 0xFFFFFFFF
        tl.store(cells + 2 * (i + 1), token)
        tl.store(cell_values + 2 * (i + 1), float_of((best + token) >> 32) - normaliser)
        keys = tl.where(keys == best, LEAST, keys)
