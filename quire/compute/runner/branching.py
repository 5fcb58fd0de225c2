"""Where drafts may be trees, and what is done when one was verified: what was kept moves to its positions.

Owns the rule of which sequences branch, and the moves. Does not own the walk (`trees.py`) nor how pages are copied
(`pool.py`).
Invariant: before the next step reads them, keys, values, features and tokens of what was kept lie as if there had been
no tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.compute.runner.pool import KVPool
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.runner.trees import Walk


class Branching:
    """`lengths.Brancher`."""

    def __init__(self, pool: KVPool, tables: SlotTables, tail: Tail) -> None:
        self._pool, self._tables, self._tail = pool, tables, tail

    def may_branch(self, slot: int) -> bool:
        """See `Brancher`: where tokens are chosen by those before them, the token table must hold these, and it holds
        one path only."""
        return not self._tail.reads_tokens(slot)

    def straighten(self, walks: Sequence[Walk]) -> None:
        """See `Brancher`."""
        if not self._tables.is_shared:
            behind = [(one.slot, one.start + 1 + k, token) for one in walks for k, token in enumerate(one.tokens)]
            if behind:
                self._tables.set_tokens(np.array(behind, np.int64).T)
        bent = [one for one in walks if not one.is_straight]
        if bent:
            slots = np.repeat([one.slot for one in bent], [len(one.nodes) for one in bent])
            sources = self._tables.cache_locs(slots, np.concatenate([one.sources for one in bent]))
            targets = self._tables.cache_locs(slots, np.concatenate([one.targets for one in bent]))
            self._pool.move(*self._tables.upload(np.stack([sources, targets])))
