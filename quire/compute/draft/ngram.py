"""Prompt lookup (Saxena 2023; vLLM's method "ngram"): what followed the last time that the same tokens stood there."""

from __future__ import annotations

import numpy as np


class NgramDrafter:
    """Looks for the latest earlier place with the longest equal ending of `longest` down to `shortest` tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """Nothing is kept."""

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """Nothing is kept."""

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        """See `SequenceDrafter`. O(length) in numpy for each size."""
        for size in self._sizes:
            if len(tokens) <= size:
                continue
            ending, before = tokens[-size:], tokens[:-1]
            starts = np.flatnonzero(before[: len(before) - size + 1] == ending[0])
            for i in range(1, size):
                starts = starts[before[starts + i] == ending[i]]
            if len(starts):
                after = int(starts[-1]) + size
                found: list[int] = tokens[after : after + n].tolist()
                return found
        return []
