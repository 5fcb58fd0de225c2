"""How memory is divided between recurrent states, kept ones and pages, where nobody says: of an engine and of a plan.

Owns both choices. Does not own the equation (`memory`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Final

SNAPSHOT_SHARE: Final = 0.1
"""Of the free memory, for kept states."""
SNAPSHOTS_EACH: Final = 4
"""For each slot, at most."""


def n_kept_states(free_bytes: int, state_bytes: int, n_seqs: int) -> int:
    """Kept beside those of the slots: what a share of the free memory holds, at most a few for each slot. free_bytes:
    with the weights loaded; state_bytes: of one sequence, 0: the model has none."""
    if not state_bytes:
        return 0
    return min(int(max(0, free_bytes) * SNAPSHOT_SHARE) // state_bytes, SNAPSHOTS_EACH * n_seqs)


def fitting_seqs(most: int, max_model_len: int, n_tokens: Callable[[int], int]) -> int:
    """The most sequences, up to `most`, beside whose states one of `max_model_len` tokens has room; where no number
    leaves that much, the most that leave half of what one alone would have; 1 where not even one fits.

    n_tokens: sequences at once → tokens of the longest one that has room; falling; 0: they do not fit.
    """
    alone = n_tokens(1)
    if not alone:
        return 1
    wanted = max_model_len if alone >= max_model_len else alone // 2
    return 1 + bisect.bisect_left(range(2, most + 1), True, key=lambda n: n_tokens(n) < wanted)
