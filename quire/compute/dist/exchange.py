"""Rows on their way to the ranks that hold their experts, and what these make of them on its way back.

Two ways. Gathered: every rank gets the rows of all, and what all made of them is summed where they came from
(all-gather, reduce-scatter). Dispatched: a row goes once to each rank that holds one of its experts (all-to-all there
and back; Lepikhin et al. 2021, "GShard", section 3.2). Owns both, and which of them a step takes. Does not own what an
expert computes, nor how ranks speak (`comm.py`).
Invariants: all ranks take the same way, as it follows from the plan and shapes; ranks hold equally many experts, in
their order; a row's sum is in the order of ranks; the ranks that share a layer, which have the same rows, send each row
once, and the sum over them is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from quire.compute.dist.comm import MeetingComm
from quire.planner import exchange as volumes

NOT_HELD: Final = -1

Compute = Callable[..., torch.Tensor]
"""(rows [n, h]; their experts [n, k] int32, as numbers among those held, -1: another rank's; weights [n, k] float32;
marks [n] int32, where rows have them) → the sums over those held [n, h], n >= 1."""
Held = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The same of any rows; experts among all, the bits of their weights and marks are one tensor, int32 [n, 2 k (+ 1)]."""


class Exchange:
    """One rank's end."""

    def __init__(
        self, comm: MeetingComm, place: int, n_sharing: int, max_rows: int, counts_bytes: int = volumes.COUNTS_BYTES
    ) -> None:
        """comm: of all ranks, neighbours sharing layers; place: among the n_sharing of them; max_rows: that experts are
        to compute at once. counts_bytes: see `planner/exchange`."""
        self._comm, self._place, self._n_sharing, self._max_rows = comm, place, n_sharing, max_rows
        self._counts_bytes = counts_bytes
        self._rows = [0] * comm.size
        """That each rank sends."""
        self._is_common = False

    def begin(self, rows: Sequence[int], *, is_common: bool = False) -> None:
        """A step begins: rows of each data-parallel rank. is_common: see `begin_common`."""
        n_sharing, self._is_common = self._n_sharing, is_common
        self._rows = [len(range(place, n, n_sharing)) for n in rows for place in range(n_sharing)]

    def begin_common(self, n_rows: int) -> None:
        """A step begins that any rank may have captured: each data-parallel rank fills its rows up to so many, so that
        what is sent has shapes that all know."""
        self.begin([n_rows] * (self._comm.size // self._n_sharing), is_common=True)

    def run(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, n_held: int, compute: Compute,
        marks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """x: [n, h], the rows of this rank's step, maybe none; expert_ids: [n, k] int32 among all experts, of which
        each rank holds n_held; weights: [n, k] float32; marks: [n] int32, what else a row takes along, on all ranks or
        on none → the sums over the experts of each row [n, h]; of several ranks that share layers, a term of them."""
        mine = slice(self._place, None, self._n_sharing)
        beside = [] if marks is None else [marks[mine, None]]
        chosen = torch.cat([expert_ids[mine], weights[mine].view(torch.int32), *beside], 1)

        def held(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return self._computed(rows, chosen, n_held, compute)

        if self.gathers(x, expert_ids.shape[1], n_held):
            y = self._gathered(x[mine], chosen, held)
        else:
            y = self._dispatched(x[mine], chosen, n_held, held)
        if self._n_sharing == 1:
            return y
        whole = torch.zeros_like(x)
        whole[mine] = y
        return whole

    def gathers(self, x: torch.Tensor, n_chosen: int, n_held: int) -> bool:
        """Whether this step's rows, like x, of n_chosen experts each, take fewer bytes if every rank gets all of them.
        Gathered, each rank sends as many as the fullest; dispatched, they go to the ranks of experts chosen evenly."""
        if self._is_common:
            return True
        row_bytes, n_ranks = x.shape[1] * x.element_size(), self._comm.size
        n_most, n_mean = max(self._rows), sum(self._rows) / n_ranks
        return volumes.gathers(n_most, n_mean, row_bytes, n_chosen, n_held * n_ranks, n_ranks, self._counts_bytes)

    def may_be_common(self, n_rows: int, row_bytes: int, n_chosen: int, n_held: int) -> bool:
        """Whether a captured step in which each data-parallel rank has so many rows, all gathered, is quicker than one
        launched kernel by kernel that dispatches them."""
        n_ranks = self._comm.size
        return volumes.may_be_common(-(-n_rows // self._n_sharing), row_bytes, n_chosen, n_held * n_ranks, n_ranks)

    def _gathered(self, x: torch.Tensor, chosen: torch.Tensor, held: Held) -> torch.Tensor:
        n, n_most = len(x), max(self._rows)
        rows, experts = (self._comm.all_gather(_padded(one, n_most)) for one in (x, chosen))
        found = held(*(
            torch.cat([of_rank[:n_rows] for of_rank, n_rows in zip(one, self._rows, strict=True)])
            for one in (rows, experts)
        ))  # fmt: skip
        back, at = torch.zeros_like(rows), 0
        for of_rank, n_rows in zip(back, self._rows, strict=True):
            of_rank[:n_rows] = found[at : at + n_rows]
            at += n_rows
        return self._comm.reduce_scatter(back)[:n]

    def _dispatched(self, x: torch.Tensor, chosen: torch.Tensor, n_held: int, held: Held) -> torch.Tensor:
        comm, n = self._comm, len(x)
        ranks = torch.arange(comm.size, device=x.device, dtype=torch.int32)
        of_rank = (chosen[:, : chosen.shape[1] // 2, None] // n_held == ranks).any(1).t()  # [size, n]
        counts = comm.all_gather(of_rank.sum(1)).tolist()
        sent, received = counts[comm.rank], [row[comm.rank] for row in counts]
        order = of_rank.nonzero()[:, 1]  # by rank, then by row
        rows, experts = (comm.all_to_all(one[order], sent, received) for one in (x, chosen))
        back = comm.all_to_all(held(rows, experts), received, sent)
        back = torch.cat([back, back.new_zeros(1, back.shape[1])])
        places = torch.where(of_rank, of_rank.flatten().cumsum(0).view_as(of_rank) - 1, len(back) - 1)
        total = torch.zeros(n, x.shape[1], device=x.device)
        for place in places:
            total += back[place]
        return total.to(x.dtype)

    def _computed(self, rows: torch.Tensor, chosen: torch.Tensor, n_held: int, compute: Compute) -> torch.Tensor:
        k = chosen.shape[1] // 2
        expert_ids, weights, marks = chosen.tensor_split((k, 2 * k), 1)
        own = expert_ids - self._comm.rank * n_held
        own = own.masked_fill((own < 0) | (own >= n_held), NOT_HELD)
        factors, found = weights.contiguous().view(torch.float32), torch.empty_like(rows)
        for at in range(0, len(rows), self._max_rows):
            piece = slice(at, at + self._max_rows)
            found[piece] = compute(rows[piece], own[piece], factors[piece], *marks[piece].unbind(1))
        return found


def _padded(x: torch.Tensor, n_rows: int) -> torch.Tensor:
    """[n_rows, ...], zeros behind x."""
    if len(x) == n_rows:
        return x.contiguous()
    found = x.new_zeros(n_rows, *x.shape[1:])
    found[: len(x)] = x
    return found
