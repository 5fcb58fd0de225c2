"""What a captured step reads of each of its rows: memory that the host fills before the step is sent.

Owns its layout, and what stands where a step has fewer rows. Does not own the copy (`device/cuda`), nor attention's.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from quire.compute.device.cuda import Staging
from quire.compute.runner import standing
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.step import Guesses
from quire.compute.runner.tables import PageWrites, SlotTables

N_ROW_LINES: Final = 2
"""Of a row: slot, position, and then for each group of layers its cache location, and one new entry of a page table
(where, page)."""


class StagedRows:
    """`rows`: int64 [N_ROW_LINES + n_groups, n]; `guesses`: int64 [n]; `writes`: int64 [2, n_groups * n]."""

    def __init__(self, staging: Staging, tables: SlotTables, n_groups: int, n_rows: int) -> None:
        """n_rows: of the largest step."""
        self._tables, self._n_groups = tables, n_groups
        self._spare_entry = tables.spare_slot * tables.pages.shape[2]  # of no sequence
        self.rows = staging.section((N_ROW_LINES + n_groups, n_rows), torch.int64)
        self.guesses = staging.section((n_rows,), torch.int64)
        self.writes = staging.section((2, n_groups * n_rows), torch.int64)

    def fill(self, size: int, batch: FlatBatch, cache_locs: np.ndarray, writes: PageWrites) -> None:
        """A step's, filled up to `size` rows."""
        n_rows, n_writes, rows, entries = len(batch.row_slots), len(writes.at), self.rows.host, self.writes.host
        rows[:, n_rows:size] = 0
        rows[0, n_rows:size] = self._tables.spare_slot
        rows[0, :n_rows], rows[1, :n_rows], rows[2:, :n_rows] = batch.row_slots, batch.row_positions, cache_locs
        most = self._n_groups * size
        entries[0, :n_writes], entries[1, :n_writes] = writes.at, writes.values
        entries[0, n_writes:most], entries[1, n_writes:most] = self._spare_entry, 0
        self.writes.filled(entries.size)

    def fill_guesses(self, size: int, guesses: Guesses | None) -> None:
        """Those of a step, if it has any."""
        self.guesses.host[:size] = standing.NO_GUESS
        if guesses is not None:
            ids = guesses.at[2]
            self.guesses.host[guesses.rows] = ids if guesses.found is None else standing.FIRST_PLACE - ids

    def fill_idle(self, size: int) -> None:
        """Rows of no sequence, which write nothing that is read."""
        self.rows.host[:, :size], self.rows.host[0, :size] = 0, self._tables.spare_slot
        self.writes.host[:, : self._n_groups * size] = np.array([self._spare_entry, 0])[:, None]
        self.writes.filled(self.writes.host.size)
        self.fill_guesses(size, None)
