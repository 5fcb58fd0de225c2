"""What the choice of a token depends on besides the logits: the controls of each row and its random number.

Owns the counter-based hash. Invariant: the random number of a row is a function of (seed, position) alone, with
the same integers in numpy, torch and Triton.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import torch

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this take the most probable token."""
FINE, NON_FINITE, EMPTY = 0, 1, 2
"""Status of a row: a token was chosen; NaN or +inf among the logits; nothing left above -inf."""
UNIFORM, INVERSE, DROP, TOP_K, TOP_P = range(5)
"""Lines of the controls: see `Draw.controls`."""
N_CONTROLS: Final = 5
N_HISTORY: Final = 7
"""Lines of what `op.penalise` is told of a row."""
LONGEST_COMPARED: Final = 4096
"""Tokens of a sequence up to which a GPU compares each with all others for penalties, and counts in no table."""


def mix(x: Any) -> Any:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers.

    x: int64 array, tensor or Triton tensor. The masks make the arithmetic shift of signed integers a logical one.
    """
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def seed_key(seed: Any) -> Any:
    """The first of two rounds of splitmix64, which depends on the seed alone. Arguments here and below as in `mix`."""
    return mix(seed - 7046029254386353131)


def keyed_bits(key: Any, position: Any) -> Any:
    """The second round: 53 random bits, int64, of each (`seed_key`, position)."""
    return (mix(key + (position + 1) * -7046029254386353131) >> 11) & 0x1FFFFFFFFFFFFF


def keyed_uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [m] in [0, 1), multiples of 2**-53, from int64 [m] values of `seed_key` and positions."""
    uniform: np.ndarray = keyed_bits(keys, positions) * 2.0**-53
    return uniform


@dataclasses.dataclass(slots=True)
class TokenMasks:
    """Which tokens some rows may choose."""

    lines: torch.Tensor
    """int32 [m]: the line of `bits` that holds for a row, or -1."""
    bits: torch.Tensor
    """int32 [k, words], each line contiguous: token t is allowed if bit t % 32 of word t // 32 is set; none
    beyond the words."""


@dataclasses.dataclass(slots=True)
class Draw:
    """Host arrays of length m, one entry for each row of logits."""

    temperature: np.ndarray
    """float32; below `GREEDY_BELOW`: argmax, and the other fields of the row are ignored."""
    uniform: np.ndarray
    """float64 in [0, 1)."""
    top_k: np.ndarray
    """int32; keep the k largest logits and their ties; 0 keeps all."""
    top_p: np.ndarray
    """float32 in (0, 1]; 1 keeps all."""
    min_p: np.ndarray
    """float32 in [0, 1]; 0 keeps all."""

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def random(self) -> np.ndarray:
        """bool [m]: rows that are not greedy."""
        return self.temperature >= GREEDY_BELOW

    @property
    def truncated(self) -> np.ndarray:
        """bool [m]: random rows that keep only a part of the vocabulary."""
        return self.random & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def controls(self) -> np.ndarray:
        """float64 [N_CONTROLS, m]: all that the choice of each row depends on.

        UNIFORM  the random number, in [0, 1)
        INVERSE  1 / temperature; 0 for a greedy row, whose other lines are neutral
        DROP     temperature * log(min_p), how far a kept logit may lie below the largest; -inf keeps all
        TOP_K    0 keeps all
        TOP_P    1 keeps all
        """
        random, temperature = self.random, self.temperature.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            drop = temperature * np.log(self.min_p, dtype=np.float64)
            inverse = 1 / temperature
        lines = np.stack([self.uniform, inverse, drop, self.top_k, self.top_p])
        neutral = np.array([0, 0, -np.inf, 0, 1])[:, None]
        return np.where(random, lines, neutral)

    def take(self, rows: np.ndarray) -> Draw:
        """The draw of some rows only."""
        return Draw(self.temperature[rows], self.uniform[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclasses.dataclass(slots=True)
class Choice:
    """Device tensors of length m."""

    token_ids: torch.Tensor
    """int32; 0 where the status is not `FINE`."""
    status: torch.Tensor
    """uint8: `FINE`, `NON_FINITE` or `EMPTY`."""
