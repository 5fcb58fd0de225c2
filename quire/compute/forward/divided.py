"""Steps whose rows are divided among ranks for everything but attention. Owns which rank has which rows, and the end.

Does not own what ranks exchange for attention (`runner/ulysses`, `runner/ring_context`). Invariant: every rank takes
the same steps, as that depends on the plan alone, and has the same bits of states at the end.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.dist.comm import MeetingComm
from quire.compute.layers.context import Context
from quire.compute.models.decoder import Decoder
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.ulysses import Ulysses
from quire.planner.context import least_rows


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """Rows of a step on the ranks."""

    rows: np.ndarray
    """int64 [m]: those that this rank has, the same number on each; padding repeats one."""
    owners: np.ndarray
    """int64 [n]: the rank of each row of the step."""
    places: np.ndarray
    """int64 [n]: which of its owner's it is."""


def in_pieces(n_rows: int, rank: int, n_ranks: int) -> Division:
    """Each rank has neighbouring rows, the first rank the first."""
    m, rows = -(-n_rows // n_ranks), np.arange(n_rows)
    return Division(np.minimum(np.arange(rank * m, (rank + 1) * m), n_rows - 1), rows // m, rows % m)


def computed(
    device: Device, model: Decoder, comm: MeetingComm, division: Division, step: Step,
    tokens: tuple[torch.Tensor, torch.Tensor], context: Context,
) -> States:  # fmt: skip
    """States of all rows where they are wanted, else of the sampled ones. tokens: (ids, positions) of this rank's rows,
    as `Decoder.forward` takes them."""
    batch = step.batch
    if step.wants_all:
        every = comm.all_gather(model.forward(*tokens, context))
        places = device.upload(np.stack([division.owners, division.places]))
        return States(every[places[0], places[1]], has_all=True, sampled=device.upload(batch.sampled_rows))
    at = np.flatnonzero(division.owners[batch.sampled_rows] == comm.rank)
    wanted = division.places[batch.sampled_rows[at]]
    hidden = model.forward(*tokens, context, device.upload(wanted if len(wanted) else np.zeros(1, np.int64)))
    every = hidden.new_zeros(len(batch.sampled_rows), hidden.shape[1])
    if len(wanted):
        every[device.upload(at)] = hidden
    return States(comm.all_reduce(every) if len(every) else every, has_all=False)  # a sum of one row and zeros


class DividedForward:
    """`Forward` of long steps where heads are divided; others are for those that compute all rows on each rank."""

    def __init__(self, device: Device, model: Decoder, pool: KVPool, tables: SlotTables, ulysses: Ulysses) -> None:
        self._device, self._model, self._pool, self._tables = device, model, pool, tables
        self._ulysses, self._least_rows = ulysses, least_rows("cpu" if device.is_host else "cuda", ulysses.n_ranks)

    def stage(self, _: Step) -> None:
        """It has little to do on the host."""

    def run(self, step: Step) -> States | None:
        """See `computed`."""
        batch, tables, ulysses = step.batch, self._tables, self._ulysses
        if len(batch.row_slots) < self._least_rows or batch.trees is not None:
            return None
        cache_locs = tables.cache_locs(batch.row_slots, batch.row_positions)
        tables.write(step.writes)
        if step.guesses is not None:
            tables.set_tokens(step.guesses.at, step.guesses.found)
        division = in_pieces(len(batch.row_slots), ulysses.rank, ulysses.n_ranks)
        lines = np.concatenate([[batch.row_slots, batch.row_positions], cache_locs])
        slots, positions, *locs = self._device.upload(lines)
        plans = plan_attention(
            self._pool, tables, batch.kv_lens, batch.span_slots, batch.q_indptr, shared=step.shared
        )  # fmt: skip
        context = ulysses.around(PagedContext(self._pool, plans, locs), positions)
        rows = self._device.upload(division.rows)
        own = tables.tokens[slots[rows], positions[rows]], positions[rows]
        return computed(self._device, self._model, ulysses.comm, division, step, own, context)

