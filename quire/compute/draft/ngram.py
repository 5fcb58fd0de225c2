"""Prompt lookup (Saxena 2023; vLLM's method "ngram"): what followed the last time that the same tokens stood there."""

from __future__ import annotations

import numpy as np

from quire.kernels import lookup


class NgramDrafter:
    """Looks for the latest earlier place with the longest equal ending of `longest` down to `shortest` tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """Nothing is kept."""

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """Nothing is kept."""

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        """See `SequenceDrafter`."""
        after = lookup.latest_match(tokens, self._shortest, self._longest) + 1
        found: list[int] = tokens[after : after + n].tolist() if after else []
        return found
