"""Long steps whose rows are divided among ranks for everything but attention. Owns which steps these are.

Does not own what ranks exchange (`runner/ulysses`). Invariant: every rank takes the same steps, as that depends on
the plan alone.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.layers.context import Context
from quire.compute.models.decoder import Decoder
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.ulysses import Ulysses, rows_of


class DividedForward:
    """`Forward` of steps with at least `least_rows` rows; others are for those that compute all rows on each rank."""

    def __init__(
        self, device: Device, model: Decoder, pool: KVPool, tables: SlotTables, ulysses: Ulysses, least_rows: int
    ) -> None:
        self._device, self._model, self._pool, self._tables = device, model, pool, tables
        self._ulysses, self._least_rows = ulysses, max(least_rows, ulysses.n_ranks)

    def stage(self, _: Step) -> None:
        """It has little to do on the host."""

    def run(self, step: Step) -> States | None:
        """States of all rows where they are wanted, else of the sampled ones; the same bits on every rank."""
        batch, tables = step.batch, self._tables
        n_rows = len(batch.row_slots)
        if n_rows < self._least_rows or batch.trees is not None:
            return None
        cache_locs = tables.cache_locs(batch.row_slots, batch.places)
        tables.write(step.writes)
        if step.guesses is not None:
            tables.set_tokens(step.guesses.at, step.guesses.found)
        own = np.asarray(rows_of(n_rows, self._ulysses.rank, self._ulysses.n_ranks))
        slots, positions, *locs = self._device.upload(
            np.concatenate([[batch.row_slots, batch.row_positions], cache_locs])
        )
        rows = self._device.upload(own)
        plans = plan_attention(
            self._pool, tables, batch.kv_lens, batch.span_slots, batch.q_indptr, shared=step.shared
        )  # fmt: skip
        context = self._ulysses.around(PagedContext(self._pool, plans, locs), positions)
        token_ids, own_positions = tables.tokens[slots[rows], positions[rows]], positions[rows]
        if step.wants_all:
            hidden = self._model.forward(token_ids, own_positions, context)
            every = self._ulysses.comm.all_gather(hidden).flatten(0, 1)[:n_rows]
            return States(every, has_all=True, sampled=self._device.upload(batch.sampled_rows))
        return self._sampled(batch, token_ids, own_positions, context)

    def _sampled(
        self, batch: FlatBatch, token_ids: torch.Tensor, positions: torch.Tensor, context: Context
    ) -> States:
        """token_ids, positions: of this rank. Each rank ends the last layer for those that it has; the sum has each once."""
        n_own = len(token_ids)
        first = self._ulysses.rank * n_own
        is_own = (batch.sampled_rows >= first) & (batch.sampled_rows < first + n_own)
        wanted, at = batch.sampled_rows[is_own] - first, np.flatnonzero(is_own)
        rows = self._device.upload(wanted if len(wanted) else np.zeros(1, np.int64))
        hidden = self._model.forward(token_ids, positions, context, rows)
        every = hidden.new_zeros(len(batch.sampled_rows), hidden.shape[1])
        if len(wanted):
            every[self._device.upload(at)] = hidden
        if len(every):
            self._ulysses.comm.all_reduce(every)
        return States(every, has_all=False)
