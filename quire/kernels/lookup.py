"""Prompt lookup: where the tokens at the end of a sequence stood before.

One native call where there is a library; `reference` is the truth, and what runs without one.
"""

from __future__ import annotations

import numpy as np

from quire.kernels import native

NOWHERE = -1


def latest_match(tokens: np.ndarray, shortest: int, longest: int) -> int:
    """The place before the last up to which the most tokens equal those up to the last one, the latest of several.

    tokens: int32 [n], contiguous. At most `longest` tokens are compared; `NOWHERE` if no `shortest` are equal.
    """
    library = native.library()
    if library is None:
        return reference(tokens, shortest, longest)
    found: int = library.quire_latest_match(tokens.ctypes.data, len(tokens), shortest, longest)
    return found


def reference(tokens: np.ndarray, shortest: int, longest: int) -> int:
    """`latest_match` in numpy: one pass over the tokens, then only over places that match."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    for back in range(1, min(longest, last + 1)):
        longer = ends[ends >= back]
        longer = longer[tokens[longer - back] == tokens[last - back]]
        if not len(longer) and back >= shortest:
            break
        ends = longer
    return int(ends[-1]) if len(ends) and last >= shortest else NOWHERE
