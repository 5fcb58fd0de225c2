"""Prompt lookup: the native scan finds what numpy finds, and both what a naive search finds."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kernels import lookup, native


def naive(tokens: list[int], shortest: int, longest: int) -> int:
    """Every ending, the longest first, at every place, the latest first."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if tokens[end - n + 1 : end + 1] == tokens[-n:]:
                return end
    return lookup.NOWHERE


@pytest.mark.parametrize("find", [lookup.reference, lookup.latest_match])
def test_the_latest_of_the_longest(find: object) -> None:
    if find is lookup.latest_match and native.library() is None:
        pytest.skip(native.explain())
    rng, n_found = np.random.default_rng(3), 0
    for _ in range(1_500):
        tokens = rng.integers(0, int(rng.integers(1, 6)), int(rng.integers(1, 40))).astype(np.int32)
        shortest = int(rng.integers(1, 4))
        longest = shortest + int(rng.integers(0, 4))
        found = find(tokens, shortest, longest)  # type: ignore[operator]
        assert found == naive(tokens.tolist(), shortest, longest), (tokens, shortest, longest)
        n_found += found != lookup.NOWHERE
    assert 300 < n_found < 1_400
    for at in (0, 60, 63, 64, 65, 127, 200):
        long = np.arange(1, 400, dtype=np.int32)
        long[at : at + 2] = long[-2:]
        assert find(long, 2, 5) == at + 1  # type: ignore[operator]
