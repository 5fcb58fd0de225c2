"""Steps where ranks take the tokens of sequences in turn: each stores its own, and computes them alone in long steps.

Owns which rows a rank has and where they are stored. Does not own attention (`runner/ring`, `runner/ring_context`).
"""

from __future__ import annotations

import numpy as np

from quire.compute.device.device import Device
from quire.compute.dist.comm import MeetingComm
from quire.compute.forward.divided import Division, computed
from quire.compute.layers.context import Context
from quire.compute.models.decoder import Decoder
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.pool import KVPool, PagedContext
from quire.compute.runner.ring import Ring
from quire.compute.runner.ring_context import RingContext
from quire.compute.runner.ring_spans import Block, blocks_of
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.ulysses import Ulysses
from quire.core.errors import EngineError
from quire.planner.context import least_rows


class RingForward:
    """`Forward` of every step: of few rows each rank has all of them."""

    def __init__(
        self, device: Device, model: Decoder, pool: KVPool, tables: SlotTables, ring: Ring, ulysses: Ulysses | None,
        comm: MeetingComm,
    ) -> None:  # fmt: skip
        """tables: whose pages have tokens of all ranks. ulysses: of the ranks whose turns are the same, None: each turn
        is one rank's. comm: of all ranks."""
        self._device, self._model, self._pool, self._tables, self._ring = device, model, pool, tables, ring
        self._ulysses, self._comm = ulysses, comm
        self._least_rows = least_rows("cpu" if device.is_host else "cuda", comm.size)

    def stage(self, _: Step) -> None:
        """It has little to do on the host."""

    def run(self, step: Step) -> States:
        """States of all rows where they are wanted, else of the sampled ones; the same bits on every rank."""
        batch, tables, ring, pool = step.batch, self._tables, self._ring, self._pool
        if batch.trees is not None:
            raise EngineError("trees of drafts are not verified by ranks that take tokens in turn")
        tables.write(step.writes)
        if step.guesses is not None:
            tables.set_tokens(step.guesses.at, step.guesses.found)
        blocks = blocks_of(batch, ring.n_ranks)
        is_divided = len(batch.row_slots) >= self._least_rows
        if is_divided:
            rows, division = _in_turn(blocks, batch, self._comm.rank, self._comm.size)
            sharings, n_real = ring.divided(pool, tables, blocks, len(rows)), len(blocks[ring.rank].rows)
        else:
            rows = np.concatenate([block.rows for block in blocks])
            places = np.empty_like(rows)
            places[rows] = np.arange(len(rows))
            division = Division(rows, np.full(len(rows), self._comm.rank), places)
            sharings, n_real = ring.whole(pool, tables, blocks), len(rows)
        lines = np.concatenate([[batch.row_slots[rows], batch.row_positions[rows]], self._locs(batch, rows, n_real)])
        slots, positions, *stored = self._device.upload(lines)
        context: Context = RingContext(ring, PagedContext(pool, [], stored), sharings, is_divided)
        tokens = tables.tokens[slots, positions], positions
        if self._ulysses is not None:
            context = self._ulysses.around(context, positions if is_divided else None)
        if is_divided:
            own = self._piece(len(rows))
            return computed(
                self._device, self._model, self._comm, division, step, (tokens[0][own], tokens[1][own]), context
            )
        wanted = None if step.wants_all else self._device.upload(division.places[batch.sampled_rows])
        if wanted is not None and not len(wanted):
            wanted = None
        hidden = self._model.forward(*tokens, context, wanted)
        if wanted is not None:
            return States(hidden, has_all=False)
        sampled = self._device.upload(batch.sampled_rows)
        return States(hidden[self._device.upload(division.places)], has_all=True, sampled=sampled)

    def _piece(self, n_rows: int) -> slice:
        """Of the rows of a turn, those that this rank has."""
        if self._ulysses is None:
            return slice(0, n_rows)
        m = n_rows // self._ulysses.n_ranks
        return slice(self._ulysses.rank * m, (self._ulysses.rank + 1) * m)

    def _locs(self, batch: FlatBatch, rows: np.ndarray, n_real: int) -> np.ndarray:
        """int64 [n_groups, m]: where this rank stores its own of these rows; 0, in the dummy page, for the others and
        for all from `n_real` on."""
        tables, n_ranks = self._tables, self._ring.n_ranks
        slots, positions = batch.row_slots[rows], batch.row_positions[rows]
        pages = tables.host_pages[:, slots, positions // tables.page_size].astype(np.int64)
        found = pages * self._pool.k.shape[3] + positions % tables.page_size // n_ranks
        is_own = (positions % n_ranks == self._ring.rank) & (np.arange(len(rows)) < n_real)
        return np.where(is_own, found, 0)


def _in_turn(blocks: list[Block], batch: FlatBatch, rank: int, n_ranks: int) -> tuple[np.ndarray, Division]:
    """The rows of this rank's turn, int64, and who has which. All turns have as much padding as makes them as many as
    those of the longest turn, and equal pieces for the ranks that have the same turn."""
    degree = n_ranks // len(blocks)
    n_each = -(-max(len(block.rows) for block in blocks) // degree)
    owners, places = np.empty_like(batch.row_slots), np.empty_like(batch.row_slots)
    for block in blocks:
        at = np.arange(len(block.rows))
        owners[block.rows], places[block.rows] = block.rank * degree + at // n_each, at % n_each
    own = blocks[rank // degree].rows
    rows = np.concatenate([own, np.zeros(n_each * degree - len(own), np.int64)])
    first = rank % degree * n_each
    return rows, Division(rows[first : first + n_each], owners, places)
