"""The work of a step on the device: one upload a step, and views into it.

Owns the device memory of work lists and partial results; what they say: tiles.py. Invariant: with `Buffers` every
address and launch size stays, so that a captured CUDA graph serves every plan written into them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import torch

from quire.kernels import transfer
from quire.kernels.attention.schedule.entries import entries_of, pairs_of
from quire.kernels.attention.schedule.pieces import FIELDS, N_TOKENS, POSITION, ROW, WorkList
from quire.kernels.attention.schedule.plan import AttnPlan, Layout, Mirrored
from quire.kernels.attention.schedule.stream import INVARIANT_KEYS
from quire.kernels.attention.schedule.tiles import cut, large_tokens_of, small_rows_of

N_CTAS = 132
"""CTAs where no device says how many it has."""

ARRAYS = {"large": FIELDS, "merges": 4, "rows": 2, "queue": 1, "blocks": 1, "small": FIELDS, "parts": 1}
"""The arrays of a work list, and the integers of a line."""
ALIGNED = 4
"""Integers that kernels may read at once: every array begins at a multiple of that."""
ZEROED = ("large", "merges")
"""Of these a launch reads more lines than there are: those behind the last are zeros. Small lines are found through
the queue."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CudaWork:
    """Work on the device: names as in csrc/cuda/attention.h. Large lines and merges beyond the real ones are zero."""

    small: torch.Tensor
    """int32 [n_small, 12]"""
    large: torch.Tensor
    """int32 [n_large, 12]"""
    queue: torch.Tensor
    """int32 [n_ctas + 1]"""
    rows: torch.Tensor
    """int32 [n, 2]"""
    merges: torch.Tensor
    """int32 [n_merges, 4]"""
    parts: torch.Tensor
    """int32 [n]"""
    blocks: torch.Tensor
    """int32 [n]"""
    partial_out: torch.Tensor
    """float32 [n_partial_rows, out_dim]"""
    partial_lse: torch.Tensor
    """float32 [n_partial_rows], base 2"""
    ticket: torch.Tensor
    """int32 [1], zero between launches"""
    n_ctas: int
    n_small: int
    """Launch sizes; 0: no launch."""
    n_large: int
    n_merges: int
    small_rows: int
    """Most packed rows of a small line: 8, 16, 32 or 64."""
    n_tokens_large: int
    """Most tokens of a large line."""
    entries: torch.Tensor | None = None
    """int32 [n]: what large lines read of a page table, see entries.py. None: buffers hold the work, in which that has
    no fixed size, or a row's bits must not depend on how much it is, or keys do not lie in pages of their own."""
    n_large_pairs: int = 0
    """Of a row and a key, of large lines; beside `entries`."""

    def on(self, page_table: torch.Tensor) -> CudaWork:
        """See `AttnPlan.on`: lines say at which entry of a page table they begin, whichever it is."""
        return self

    def place(self, positions: torch.Tensor) -> None:
        """See `AttnPlan.place`: a line ends at its row's position at the latest, and one that begins behind it adds
        nothing. Lines behind the real ones say anything."""
        rows = self.small[:, ROW].clamp(0, len(positions) - 1)
        self.small[:, POSITION] = positions.index_select(0, rows)


def make(plan: AttnPlan, device: torch.device | None = None, n_ctas: int = 0) -> CudaWork:
    """Cut a plan and send it to a device (None: where its page table is). n_ctas: 0 asks the device."""
    device = device or device_of(plan)
    n_ctas = n_ctas or n_ctas_of(device)
    work = cut(plan, n_ctas)
    arrays = [getattr(work, name) for name in ARRAYS]
    sizes = {name: len(array) for name, array in zip(ARRAYS, arrays, strict=True)}
    lists = plan.layout is Layout.PAGED and not plan.batch_invariant and len(work.large) > 0
    entries = entries_of(work.large, plan.page_size) if lists else np.zeros(0, np.int32)
    packed = np.zeros(_n_ints(sizes) + len(entries) + 1, np.int32)
    for start, array in zip((*_starts(sizes), _n_ints(sizes)), (*arrays, entries), strict=True):
        packed[start : start + array.size] = array.reshape(-1)
    flat = transfer.upload(packed, device)
    ticket = flat[-1:]
    most = int(work.small[:, N_TOKENS].max(initial=1)) * plan.heads.group
    made = _views(plan, flat, ticket, sizes, work.n_partial_rows, _rows_of(most), n_ctas)
    if not lists:
        return made
    return dataclasses.replace(made, entries=flat[-1 - len(entries) : -1], n_large_pairs=pairs_of(work.large))


class _OwnMemory:
    """`Mirrored` memory that is sent as soon as it is filled."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.device = torch.zeros(n, dtype=torch.int32, device=device)
        self.host = np.zeros(n, np.int32)

    def filled(self, n: int) -> None:
        transfer.write(self.host[:n], self.device)


class Buffers:
    """Fixed device memory for the work of steps with at most `max_spans` small spans and `max_large` large lines."""

    def __init__(
        self,
        plan: AttnPlan,
        max_spans: int,
        max_large: int = 0,
        n_ctas: int = 0,
        *,
        span_tokens: int = 0,
        max_rows: int = 0,
        max_keys: int = 1 << 20,
        max_blocks: int = 0,
        device: torch.device | None = None,
        memory: Mirrored | None = None,
    ) -> None:
        """plan: any plan of the same layout, heads and mode. device: None: where its page table is. memory: where lists
        go, at its start; None: own memory, sent by `fill`. Buffers may share memory if one of them is in use at a time.

        max_large: large lines, after splitting; 0 also leaves prefixes unshared. span_tokens: most tokens of a small
        span, 0: all that fit a small line; fewer make narrower lines if nothing is shared. max_rows: rows of q of a
        step, 0: as many as the spans and large lines hold. max_keys: keys of all small spans together
        (batch-invariant mode). max_blocks: entries of all lists of pages (SPARSE).
        """
        heads, device = plan.heads, device or device_of(plan)
        n_ctas = n_ctas or n_ctas_of(device)
        n_heads, n_tokens = heads.n_kv_heads, large_tokens_of(heads.group)
        most_tokens = max(1, small_rows_of(heads.group) // heads.group)
        span_tokens = span_tokens or most_tokens
        max_rows = max_rows or max_spans * span_tokens + max_large * n_tokens
        n_cuts = max_keys // INVARIANT_KEYS * n_heads if plan.batch_invariant else n_ctas - 1
        # A cut makes one line more, and at most two with partial results. Any row may share a prefix: it has then a
        # line of its own and a gathered one.
        n_shared, n_groups = (max_rows, max_spans // 2) if max_large else (0, 0)
        self._line_tokens = most_tokens if max_large and not plan.batch_invariant else span_tokens
        n_parts = 2 * (n_cuts * self._line_tokens + n_shared * n_heads) + max_large * n_tokens * n_heads
        self._like = _kind(plan)
        self._limits = f"{max_spans} spans of {span_tokens} tokens, {max_large} large lines and {max_rows} rows"
        sizes = {
            "queue": n_ctas + 1,
            "small": (max_spans + n_groups) * n_heads + n_cuts,
            "large": max_large,
            "rows": n_shared,
            "merges": min(n_parts // 2, max_rows * n_heads),
            "blocks": max_blocks,
            "parts": n_parts,
        }
        # What is last is sent as far as it is filled: it is the longer one of both that have no zeros behind them.
        last = sorted(("small", "parts"), key=lambda name: sizes[name] * ARRAYS[name])
        self._sizes = {name: sizes[name] for name in [*(name for name in ARRAYS if name not in last), *last]}
        self.n_ints = _n_ints(self._sizes)
        self._n_partial_rows = n_parts * heads.group
        self._memory = memory or _OwnMemory(self.n_ints, device)
        if len(self._memory.device) < self.n_ints:
            raise ValueError(f"{self._limits} need {self.n_ints} integers, the memory holds {len(self._memory.device)}")
        rows = _rows_of(self._line_tokens * heads.group)
        ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self.work = _views(plan, self._memory.device, ticket, self._sizes, self._n_partial_rows, rows, n_ctas)

    def fill(self, plan: AttnPlan) -> CudaWork:
        """Write a step's work, in stream order, in one copy (with `memory`: into its host's side). Raises ValueError
        when the step does not fit."""
        if _kind(plan) != self._like:
            raise ValueError(f"buffers were made for plans with {self._like}, this one has {_kind(plan)}")
        work = cut(plan, self.work.n_ctas, self._sizes["large"])
        self._check(plan, work)
        used, host = 0, self._memory.host
        for at, (name, size) in zip(_starts(self._sizes), self._sizes.items(), strict=True):
            array = getattr(work, name).reshape(-1)
            used = at + len(array)
            host[at:used] = array
            if name in ZEROED:
                host[used : at + size * ARRAYS[name]] = 0
        self._memory.filled(used)
        return self.work

    def _check(self, plan: AttnPlan, work: WorkList) -> None:
        needed = {name: len(getattr(work, name)) for name in ARRAYS}
        needed["partial rows"] = work.n_partial_rows
        needed["tokens of a small line"] = int(work.small[:, N_TOKENS].max(initial=0))
        held = self._sizes | {"partial rows": self._n_partial_rows, "tokens of a small line": self._line_tokens}
        for name, size in held.items():
            if needed[name] > size:
                n_spans = int((plan.spans.lengths > 0).sum())
                raise ValueError(
                    f"{n_spans} spans with {plan.n_rows} rows need {needed[name]} {name}, but buffers for "
                    f"{self._limits} hold {size}: plan without buffers, or make them larger"
                )


def _starts(sizes: dict[str, int]) -> list[int]:
    """Where each array begins, in this order."""
    ends = itertools.accumulate(-(-size * ARRAYS[name] // ALIGNED) * ALIGNED for name, size in sizes.items())
    return [0, *ends][:-1]


def _n_ints(sizes: dict[str, int]) -> int:
    """Integers of all arrays."""
    return sum(-(-size * ARRAYS[name] // ALIGNED) * ALIGNED for name, size in sizes.items())


def _kind(plan: AttnPlan) -> dict[str, object]:
    """What kernels are compiled for, and sizes of buffers follow from."""
    return {name: getattr(plan, name) for name in ("layout", "heads", "page_size", "batch_invariant")}


def device_of(plan: AttnPlan) -> torch.device:
    """Where the plan's page table lies; a plan without one does not say, and is taken to be the CPU's."""
    return torch.device("cpu") if plan.page_table is None else plan.page_table.device


@functools.cache
def n_ctas_of(device: torch.device) -> int:
    """CTAs of the persistent grid that fills a device: one a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else N_CTAS


def _rows_of(n_rows: int) -> int:
    return max(8, 1 << (n_rows - 1).bit_length())


def _views(
    plan: AttnPlan,
    flat: torch.Tensor,
    ticket: torch.Tensor,
    sizes: dict[str, int],
    n_partial_rows: int,
    small_rows: int,
    n_ctas: int,
) -> CudaWork:
    """The arrays in a flat upload, in the order of `sizes`."""
    views: dict[str, Any] = {}
    for at, (name, size) in zip(_starts(sizes), sizes.items(), strict=True):
        fields = ARRAYS[name]
        view = flat[at : at + size * fields]
        views[name] = view if fields == 1 else view.view(-1, fields)
    return CudaWork(
        **views,
        partial_out=torch.empty(n_partial_rows, plan.heads.out_dim, dtype=torch.float32, device=flat.device),
        partial_lse=torch.empty(n_partial_rows, dtype=torch.float32, device=flat.device),
        ticket=ticket,
        n_ctas=n_ctas,
        n_small=sizes["small"],
        n_large=sizes["large"],
        n_merges=sizes["merges"],
        small_rows=small_rows,
        n_tokens_large=large_tokens_of(plan.heads.group),
    )
