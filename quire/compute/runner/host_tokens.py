"""The host's copy of every slot's tokens, for drafters that read texts: where a device keeps its own.

Owns when what steps have chosen is written here. Does not own what of a step counts (`lengths.py`).
Invariants: steps come in order, and what a later one says of a place holds; a step's tokens are its sequences', whoever
has their slots since. Steps without drafts are written when somebody reads, or many together: where nothing is drafted
for long, one by one they would take a part of each step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from quire.compute.runner.tables import SlotTables

MOST_LATE: Final = 2048
STEP_ROWS: Final = 32
"""Rows that are not written yet, where a step counts as so many more: writing them takes some tens of microseconds."""


class HostTokens:
    """See the module."""

    def __init__(self, tables: SlotTables) -> None:
        self.is_live = tables.is_shared
        """The host sees the token table itself: a step's tokens are there when it ends."""
        self._tokens = tables.tokens.numpy() if self.is_live else np.zeros(tuple(tables.tokens.shape), np.int32)
        self.n_opened = 0
        """Sequences so far. By what it was when a step was launched can be told whether that one's are there yet."""
        self.opened_at = np.zeros(len(self._tokens), np.int64)
        """The number of the sequence that each slot has, or had last."""
        self._late: list[tuple[np.ndarray, np.ndarray, torch.Tensor, int]] = []
        """Slots, positions and token ids of steps that are to be written, and `n_opened` when they were launched."""
        self._n_late = 0

    @property
    def newest(self) -> np.ndarray:
        """int32 [n_slots, length]: all that is known, to be read or written at once."""
        if self._late:
            self._write_late()
        return self._tokens

    def open(self, slot: int, token_ids: list[int]) -> None:
        """Another sequence is in this slot."""
        self.n_opened += 1
        self.opened_at[slot] = self.n_opened
        if not self.is_live:
            self._tokens[slot, : len(token_ids)] = token_ids

    def is_there(self, slot: int, n_opened: int) -> bool:
        """Whether the sequence that a step had in this slot, launched when so many were opened, has it still."""
        return bool(self.opened_at[slot] <= n_opened)

    def add(self, slots: np.ndarray, positions: np.ndarray, token_ids: torch.Tensor, n_opened: int) -> None:
        """What a step chose, int64 [m] and int32 [m] on the host; n_opened: when it was launched. None of it changes
        any more. Nothing to do where the host sees the token table."""
        if self.is_live:
            return
        self._late.append((slots, positions, token_ids, n_opened))
        self._n_late += STEP_ROWS + len(slots)
        if self._n_late > MOST_LATE:
            self._write_late()

    def _write_late(self) -> None:
        late, self._late, self._n_late = self._late, [], 0
        slots, positions, ids, n_opened = zip(*late, strict=True)
        at, places, token_ids = np.concatenate(slots), np.concatenate(positions), torch.cat(ids).numpy()
        if self.n_opened > n_opened[0]:
            is_there = self.opened_at[at] <= np.repeat(n_opened, [len(one) for one in slots])
            at, places, token_ids = at[is_there], places[is_there], token_ids[is_there]
        self._tokens[at, places] = token_ids
