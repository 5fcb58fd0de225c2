"""Which entries of a page table the large lines of a step read: what is to be widened for them (triton/widening.py).

Host only, numpy. Owns no lines. Invariant: each entry once, those of a sequence in the order of its keys.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.attention.schedule.pieces import BEGIN, END, KV_AT, N_TOKENS, repeat


def entries_of(large: np.ndarray, page_size: int) -> np.ndarray:
    """large: int32 [n, 12], lines over pages → int32 [n_entries]: from the first page that a line of a sequence reads
    to the last one, of each sequence."""
    at, owner = np.unique(large[:, KV_AT], return_inverse=True)
    first, last = np.full(len(at), np.iinfo(np.int32).max), np.zeros(len(at), np.int64)
    np.minimum.at(first, owner, large[:, BEGIN] // page_size)
    np.maximum.at(last, owner, -(-large[:, END] // page_size))
    sequence, index = repeat(np.maximum(last - first, 0))
    found: np.ndarray = (at[sequence] + first[sequence] + index).astype(np.int32)
    return found


def pairs_of(large: np.ndarray) -> int:
    """Rows times keys, those that some row does not see counted in."""
    return int((large[:, N_TOKENS].astype(np.int64) * (large[:, END] - large[:, BEGIN])).sum())
