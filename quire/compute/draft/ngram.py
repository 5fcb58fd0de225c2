"""Prompt lookup (Saxena 2023; vLLM's method "ngram"): what followed the last time that the same tokens stood there."""

from __future__ import annotations

import numpy as np


class NgramDrafter:
    """Looks for the latest earlier place with the longest equal ending of `longest` down to `shortest` tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """Nothing is kept."""

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """Nothing is kept."""

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        """See `SequenceDrafter`. One pass over the tokens; then only over places that match."""
        last = len(tokens) - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        for back in range(1, min(self._longest, last + 1)):
            if not len(ends):
                return []
            longer = ends[ends >= back]
            longer = longer[tokens[longer - back] == tokens[last - back]]
            if not len(longer) and back >= self._shortest:
                break
            ends = longer
        if not len(ends) or last < self._shortest:
            return []
        after = int(ends[-1]) + 1
        found: list[int] = tokens[after : after + n].tolist()
        return found
